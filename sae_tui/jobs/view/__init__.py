"""What is told of jobs: lists, searches, logs and the cause of a failure."""
