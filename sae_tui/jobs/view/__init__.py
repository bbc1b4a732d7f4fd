"""Prepares jobs for display: lists, searches, logs, processes, and failure causes."""
