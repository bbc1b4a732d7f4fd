"""The products of a training step: the encoder makes one dense product, the others read only active latents."""
