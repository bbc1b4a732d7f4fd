"""The SQLite stores of jobs and of the metrics of runs."""
