"""Extracts a language model's activations on a text corpus and stores them as shards."""
