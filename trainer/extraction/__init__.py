"""Extracts the activations of a language model on a text, and stores them as shards."""
