"""Metrics as sums over tokens and ranks; the registry in `trainer.contract.catalog` names them."""
