"""A run on disk: the instructions for its ranks, the files that the ranks write, and the code that resumes the run."""
