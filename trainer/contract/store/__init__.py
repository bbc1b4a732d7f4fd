"""The SQLite stores for jobs and for the metrics of runs."""
