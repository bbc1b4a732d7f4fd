"""The parts of the app, one class per responsibility; `sae_tui.app` connects them."""
