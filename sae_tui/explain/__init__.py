"""Describes an SAE's latents with a language model behind an OpenAI-compatible server, and scores the descriptions."""
