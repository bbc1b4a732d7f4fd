"""The GPUs and jobs of other hosts, over the user's own ssh. It contains no UI code."""
