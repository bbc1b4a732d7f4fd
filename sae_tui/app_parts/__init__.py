"""What the app consists of, a class for each of its jobs; `sae_tui.app` puts them together."""
