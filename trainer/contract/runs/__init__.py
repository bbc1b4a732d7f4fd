"""The files in a run folder: instructions for the ranks, files written by the ranks, and the state needed to resume."""
