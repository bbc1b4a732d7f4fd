"""Terminal app for monitoring GPUs and launching SAE training jobs. Importing this package loads no other module."""
