"""The files of a run: instructions for its ranks, files that the ranks write, and the state needed to resume it."""
