"""What a run tells the outside: metrics, progress and its log."""
