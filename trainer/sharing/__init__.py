"""File formats used by other tools, registered in `trainer.contract.settings.catalog`."""
