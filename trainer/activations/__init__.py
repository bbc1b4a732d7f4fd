"""Sources of activations, and the order in which their rows are trained on."""
