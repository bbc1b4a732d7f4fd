"""Entry point of `python -m trainer`."""

from __future__ import annotations

import sys

from trainer.cli import main

sys.exit(main())
