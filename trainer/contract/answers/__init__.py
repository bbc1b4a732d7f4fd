"""JSON Schemas for the output of `sae-train`, built from its types."""
