"""The job queue: determines the order of queued jobs, why each of them waits, and when it starts."""
