"""Trains SAEs: the training loop, evaluation on held-out rows, checkpoints, import and export."""
