"""The parallel modes, in which ranks share the work; `trainer.contract.settings.catalog` lists them."""
