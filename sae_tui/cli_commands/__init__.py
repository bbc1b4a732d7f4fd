"""The shell commands of `sae-tui`: they call the same functions as the screens and print tables or JSON."""
