"""The ways in which ranks share the work; the registry in `trainer.contract.settings.catalog` names the modes."""
