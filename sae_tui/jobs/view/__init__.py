"""Views of jobs: lists, searches, logs and the cause of a failure."""
