"""Headless trainer for sparse autoencoders. Importing this package loads no other module."""

# `sae_tui.own_trainer` searches this file for the next line, because PyPI has another package called trainer.
PART_OF = "sae-tui"
