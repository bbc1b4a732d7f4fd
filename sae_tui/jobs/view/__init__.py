"""Prepares jobs for display: lists, searches, logs, processes, and causes of failures."""
