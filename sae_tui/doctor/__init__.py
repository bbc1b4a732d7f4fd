"""What of this machine, this session and this terminal is in the way of a training; knows nothing of a screen."""
