"""From a job file to a launched job: what is asked for, where it is to run, and whether that is there."""
