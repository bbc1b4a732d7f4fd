"""File formats of other tools, registered in `trainer.contract.settings.catalog`."""
