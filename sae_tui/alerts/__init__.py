"""Alerts: what goes wrong on this machine for so long that somebody should know; nothing here needs a screen."""
