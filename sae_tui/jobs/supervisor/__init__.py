"""The supervisor: a process that manages a job from the queue to its end."""
