"""Jobs that are deleted, found again or mended, and the disk that holds them."""
