"""Who has which GPU: other processes, other jobs, and the locks that reserve them."""
