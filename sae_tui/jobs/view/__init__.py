"""Prepares jobs for display: lists, searches, logs, processes, and the causes of failures."""
