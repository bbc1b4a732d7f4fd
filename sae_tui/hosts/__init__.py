"""Shows the GPUs and jobs on other hosts over the user's own ssh. This package contains no UI code."""
