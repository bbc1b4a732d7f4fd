"""The arithmetic and the memory of the device that a rank runs on."""
