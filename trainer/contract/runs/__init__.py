"""The files of a run: the instructions for its ranks, the files that the ranks write, and how the run is resumed."""
