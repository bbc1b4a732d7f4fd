"""What turns gradients into steps; the registry in `trainer.contract.catalog` names them."""
