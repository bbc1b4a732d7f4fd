"""The products of a training step: one dense product in the encoder, everything else touches active latents only."""
