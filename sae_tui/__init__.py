"""Terminal app that monitors GPUs and launches SAE trainings. Importing it loads nothing."""
