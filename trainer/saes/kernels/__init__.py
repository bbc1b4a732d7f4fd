"""The matrix products of a training step; all except the encoder's dense product read only active latents."""
