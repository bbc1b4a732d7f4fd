"""A run on disk: the instructions for its ranks, the files that they write, and the code that resumes it."""
