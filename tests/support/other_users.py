"""Text from another user that tries to control the terminal, and checks of the output."""

from __future__ import annotations

import codecs
import random
import re
import string
from collections.abc import Iterable

# Characters that control a terminal, or that reverse, hide or truncate the neighbouring text.
PIECES = (
    "\x1b[7331m", "\x1b]52;c;UFdORUQ=\x07", "\x1b]2;owned\x1b\\", "\x1b]8;;http://evil\x1b\\", "\x1bPq#0\x1b\\",
    "\x1b_Gi=1\x1b\\", "\x1bc", "\x1b[2J", "\x1b[9999;1H", "\x1b[21t", "\x1b[6n", "\x1bZ", "\x9b7331m", "\x9d2;own\x9c",
    "\x90q\x9c", "\x84", "\x85", "\x07", "\b\b\b", "\r", "\x0b", "\x0c", "\x7f", "\x0e", "\u2028", "\u2029", "\u202e",
    "\u202a", "\u2066", "\u2069", "\u200f", "\u200b", "\ufeff", "\U000e0041", "\t", "\n",
)  # fmt: skip
# Bytes that are not valid UTF-8, which file names and command lines may contain.
BYTES = ("\udc9b", "\udcff")
MARKUP = "[b]"
_LETTERS = string.digits + string.ascii_lowercase
# Sequences that the app itself sends: styles, cursor positions, terminal modes and terminal queries.
_OWN = re.compile(
    r"\x1b\[\d{0,3}(?:;\d{0,3})*m|\x1b\[\d{1,3};\d{1,3}H|\x1b\[H|\x1b\[\?\d{1,4}(?:[hl]|\$p)|\x1b\[[<>=]\d*u|\x1b\[\?u"
    r"|\x1b\[>\d*[cq]|\x1b\]22;[a-z-]+\x07|\x1b\[2J(?=\x1b\[H)|\r\n"
)


class Texts:
    """Creates a string for each label.

    A string consists of characters that identify the label, of markup, and of shuffled `PIECES`.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._cores: dict[str, str] = {}

    @property
    def labels(self) -> set[str]:
        return set(self._cores)

    def core(self, label: str) -> str:
        """Return the three characters that identify a label's string and occur nowhere else."""
        number = len(self._cores)
        return self._cores.setdefault(label, f"Ж{_LETTERS[number // 36]}{_LETTERS[number % 36]}")

    def text(self, label: str, *, pieces: Iterable[str] = PIECES) -> str:
        order = random.Random(f"{self._seed} {label}")
        return self.core(label) + MARKUP + "".join(order.sample(list(pieces), len(list(pieces))))

    def short(self, label: str) -> str:
        """Return a string for a short field, such as the name of a GPU."""
        return self.text(label)[:40]

    def line(self, label: str) -> str:
        """Return text for a single line, such as another program's output."""
        return self.text(label, pieces=[piece for piece in PIECES if not piece.isspace() and piece != "\x85"])

    def log(self, label: str) -> str:
        """Return text for a log, without carriage returns, which would overwrite the preceding text."""
        return self.text(label).replace("\r", "")

    def file(self, label: str) -> str:
        """Return text for file names and command-line arguments, with bytes that are not UTF-8."""
        return self.text(label, pieces=[*PIECES[::2], *BYTES]).replace("/", "")

    def seen(self, shown: str) -> set[str]:
        """Return the labels whose strings are shown."""
        return {label for label, core in self._cores.items() if core in shown}


def taken_for_markup(shown: str) -> list[str]:
    """Return the strings whose markup was interpreted and is therefore not shown, although there is enough space."""
    return re.findall("Ж..�.{0,8}", shown)


def leaked(raw: bytes) -> list[str]:
    """Return the control sequences that the app itself did not send, with the surrounding text."""
    # Output that was not read completely may end in the middle of a character or a sequence.
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(raw)
    left = _OWN.sub("", re.sub("\x1b[^\x1b]{0,80}$", "", text))
    return [left[max(0, at - 20) : at + 20] for at, char in enumerate(left) if not char.isprintable()]
