"""The screens, reached by name."""
