"""What commands answer in JSON, as JSON Schemas: beside each module lie the files that are made of it."""
