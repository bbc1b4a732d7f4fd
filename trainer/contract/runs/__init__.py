"""A run on disk: the instructions for its ranks, the files they leave, and how it is resumed."""
