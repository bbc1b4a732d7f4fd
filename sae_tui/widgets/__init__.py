"""Widgets that know Textual and nothing of ours but the contract's knobs."""
