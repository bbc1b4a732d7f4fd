"""The panels, one per file; a panel turns GPU samples or job data into lines of text."""
