"""Metrics as sums over tokens and ranks; the registry in `trainer.contract.settings.catalog` names them."""
