"""Optimizers; the registry in `trainer.contract.settings.catalog` lists them."""
