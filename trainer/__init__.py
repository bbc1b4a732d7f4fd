"""Headless trainer of sparse autoencoders. Importing it loads nothing."""
