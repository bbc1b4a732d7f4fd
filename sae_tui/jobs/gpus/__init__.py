"""Determines which jobs and other processes use each GPU, and reserves GPUs with locks."""
