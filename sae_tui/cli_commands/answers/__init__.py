"""What `sae-tui COMMAND --json` answers, as JSON Schemas: beside the modules lie the files that are made of them."""
