"""Other tools that a run's metrics are mirrored to: a file for each."""
