"""JSON Schemas of the answers of `sae-train`, built from types."""
