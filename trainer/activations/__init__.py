"""Where activations come from and in which order they are seen."""
