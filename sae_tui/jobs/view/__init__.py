"""Views of jobs: lists, searches, logs, and the causes of failures."""
