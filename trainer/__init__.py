"""Headless trainer for sparse autoencoders. Importing this package loads no other module."""
