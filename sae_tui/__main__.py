"""Runs the `sae-tui` program for `python -m sae_tui`."""

from __future__ import annotations

import sys

from sae_tui.cli import main

if __name__ == "__main__":
    sys.exit(main())
