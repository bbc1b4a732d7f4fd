"""JSON Schemas of the answers of `python -m trainer`, built from types."""
