"""Metrics computed from sums over tokens and ranks; `trainer.contract.settings.catalog` registers them."""
