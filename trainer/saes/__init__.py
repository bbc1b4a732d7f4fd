"""SAE architectures; the registry in `trainer.contract.settings.catalog` names them."""
