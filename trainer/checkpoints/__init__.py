"""Writes weights to disk: checkpoints to resume from, and folders of SAEs."""
