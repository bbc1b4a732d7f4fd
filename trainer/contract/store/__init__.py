"""The SQLite files that hold jobs and the metrics of runs."""
