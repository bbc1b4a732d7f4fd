"""File formats of other tools, which `trainer.contract.settings.catalog` registers."""
