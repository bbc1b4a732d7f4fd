"""Formats of other tools; the registry in `trainer.contract.settings.catalog` names them."""
