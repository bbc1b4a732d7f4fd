"""What can be asked for: the job file, its settings and the registries that they name."""
