"""Folders of weights on disk: checkpoints to resume from, SAEs for other tools."""
