"""Reports a run: its metrics, its progress and its log."""
