"""The matmuls in a training step; all except the encoder's dense matmul read only active latents."""
