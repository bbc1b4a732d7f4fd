"""What the app, the command line, the supervisor and the ranks agree on; loads no torch."""
