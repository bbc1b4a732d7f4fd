"""JSON Schemas for the output of `sae-tui COMMAND --json`, built from types."""
