"""The SQLite stores for jobs and run metrics."""
