"""The commands of `sae-tui` for the shell: the functions the screens call, printed as tables or JSON."""
