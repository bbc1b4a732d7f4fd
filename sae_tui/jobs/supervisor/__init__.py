"""The supervisor, a process that follows a job from the queue to its end."""
