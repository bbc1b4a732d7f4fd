"""Checks what of this machine, this session and this terminal hinders a training; independent of any screen."""
