"""The matrix products of a training step: the encoder's product is dense, and the others read only active latents."""
