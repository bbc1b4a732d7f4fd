"""Jobs that wait: in which order, for what, and until when."""
