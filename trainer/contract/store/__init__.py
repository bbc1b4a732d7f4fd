"""What is written down of jobs and runs: the SQLite files."""
