"""JSON Schemas for the output of `sae-train`, built from the output types."""
