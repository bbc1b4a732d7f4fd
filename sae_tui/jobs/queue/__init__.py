"""The job queue: determines the order of queued jobs, why each one is waiting, and when it starts."""
