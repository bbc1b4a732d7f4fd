"""Writes weights to disk: checkpoints for resuming, and SAE folders."""
