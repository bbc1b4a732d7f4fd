"""Code shared by the app, the command line, the supervisor and the ranks; does not import torch."""
