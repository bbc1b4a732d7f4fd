"""A run on disk: what its ranks are told, what they leave, and how it goes on."""
