"""Terminal app that monitors GPUs and launches SAE training jobs. Importing this package loads no other module."""
