"""The page for a session: the terminal from textual-serve, without content from other sites."""

from __future__ import annotations

import html
import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path

from trainer.contract.errors import UserError

MISSING = "serve needs a terminal for browsers: pip install 'sae-tui[web]'"
# Maps the name of each page file to its path in textual-serve and its content type.
_BROUGHT = {
    "terminal.js": ("js/textual.js", "text/javascript"),
    "terminal.css": ("css/xterm.css", "text/css"),
    "mono.ttf": ("fonts/RobotoMono-VariableFont_wght.ttf", "font/ttf"),
}
_STYLE = """\
@font-face { font-family: "Roboto Mono"; src: url("mono.ttf"); font-weight: 100 700; font-display: block; }
html, body { margin: 0; height: 100%; overflow: hidden; background: #111; color: #ddd; }
body { font: 16px "Roboto Mono", monospace; }
.textual-terminal { width: 100vw; height: 100vh; }
.notice { position: fixed; inset: auto 0 0 0; z-index: 20; margin: 0; padding: 8px 16px; background: #333; }
.closed, body.-first-byte .opening, body.-closed .opening { display: none; }
body.-closed .closed { display: block; }
"""
# Without this script, no key reaches the terminal until the user clicks. This script must run after the textual-serve
# script.
_SCRIPT = """\
addEventListener("load", () => document.querySelector(".textual-terminal textarea").focus());
"""
# The textual-serve script connects each element of the class `textual-terminal`. That script also records the
# connection state in the body's classes.
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<link rel="preload" href="{base}mono.ttf" as="font" type="font/ttf" crossorigin>
<link rel="stylesheet" href="{base}terminal.css">
<link rel="stylesheet" href="{base}page.css">
<script src="{base}terminal.js"></script>
<script src="{base}page.js"></script>
</head>
<body>
<div class="textual-terminal" data-session-websocket-url="{address}look" data-font-size="16"></div>
<p class="notice opening">Opening…</p>
<p class="notice closed">This session has ended. Reload the page to open another.</p>
<noscript><p class="notice">A terminal in a browser needs JavaScript.</p></noscript>
</body>
</html>
"""
Asset = tuple[str, bytes]  # content type and content


def read_assets() -> Mapping[str, Asset]:
    """Return a dict mapping the name of each page file to its content; raise `UserError` if one is missing."""
    spec = importlib.util.find_spec("textual_serve")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(MISSING)
    folder = Path(spec.submodule_search_locations[0]) / "static"
    try:
        brought = {name: (kind, (folder / file).read_bytes()) for name, (file, kind) in _BROUGHT.items()}
    except OSError as error:
        raise UserError(
            f"this version of textual-serve is not supported: {error}; run pip install 'sae-tui[web]'"
        ) from None
    own = {"page.css": ("text/css", _STYLE.encode()), "page.js": ("text/javascript", _SCRIPT.encode())}
    return brought | own


def page(host: str, base: str) -> Asset:
    """Return the page for a browser that connected to `host` (name and port); its files are under `base`."""
    title = f"sae-tui on {socket.gethostname()}"
    names = {"title": title, "base": base, "address": f"ws://{host}{base}"}
    return "text/html", _PAGE.format(**{name: html.escape(value) for name, value in names.items()}).encode()
