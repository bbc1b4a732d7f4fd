"""Widgets that depend on Textual and, within this project, only on `format`, `theme` and the contract's settings."""
