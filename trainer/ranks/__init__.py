"""The processes of a run: how they start, on which devices, and how they end."""
