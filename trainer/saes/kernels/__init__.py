"""The matrix products of a training step: that of the encoder is dense, and the others read only active latents."""
