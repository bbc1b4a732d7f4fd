"""Widgets depending on Textual and, within this project, only on the settings in the contract."""
