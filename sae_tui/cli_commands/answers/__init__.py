"""JSON Schemas of the answers of `sae-tui COMMAND --json`, built from types."""
