"""Other tools' file formats, registered in `trainer.contract.settings.catalog`."""
