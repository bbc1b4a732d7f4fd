"""Other hosts' GPUs and jobs, over the user's own ssh; no screen is here."""
