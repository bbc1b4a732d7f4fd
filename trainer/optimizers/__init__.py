"""Optimizers, which turn gradients into steps; the registry in `trainer.contract.settings.catalog` names them."""
