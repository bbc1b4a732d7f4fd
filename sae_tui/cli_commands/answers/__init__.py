"""JSON Schemas of the output of `sae-tui COMMAND --json`, built from types."""
