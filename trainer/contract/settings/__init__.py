"""The job file: its settings, and the registries of names that it may use."""
