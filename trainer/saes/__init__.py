"""SAE architectures; the registry in `trainer.contract.catalog` names them."""
