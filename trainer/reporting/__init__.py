"""The reports of a run: metrics, progress and its log."""
