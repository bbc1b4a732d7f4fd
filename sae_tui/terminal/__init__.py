"""The layer between Textual and the terminal: key input and screen output."""
