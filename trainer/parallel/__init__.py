"""How ranks share the work; the registry in `trainer.contract.catalog` names the modes."""
