"""From a language model and a text to shards of activations."""
