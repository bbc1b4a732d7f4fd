"""Trains: one step after the other, held-out measurements, and what is written at the end."""
