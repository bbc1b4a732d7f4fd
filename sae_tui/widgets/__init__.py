"""Widgets that depend on Textual and, from this project, only on the settings of the contract."""
