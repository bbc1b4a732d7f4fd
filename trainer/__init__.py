"""Headless trainer of sparse autoencoders. Importing this package loads no other module."""
