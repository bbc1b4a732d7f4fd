"""An SAE in its language model, interactively: the latents that fire on a text, and steered generation."""
