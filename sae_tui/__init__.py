"""Terminal app that monitors GPUs and launches SAE trainings. Importing this package loads no other module."""
