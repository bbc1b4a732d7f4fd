"""Between Textual and the terminal: keys as they come, and bytes as they go."""
