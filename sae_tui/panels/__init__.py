"""One panel per file; a panel turns what the sampler and the job store know into lines."""
