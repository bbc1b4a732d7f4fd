"""Counts words that plain technical English avoids: `PYTHONPATH=tests python -m support.plain_words PATH…`.

Prose is what people read: docstrings, comments, messages (literals of several words) and Markdown outside code.
"""

import argparse
import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# One regular expression per habit. A hit is not always a mistake, so the limit in `make check` is above 0.
MARKERS = (
    r"told|tells?|telling",
    r"nobody|everybody|somebody|anybody|whoever|whomever",
    r"anew",
    r"beside",
    r"of (?:which|whom|whose)|by which|for which|from which|to which|with which|out of which",
    r"so many|so much|as many as|as much as",
    r"those (?:of|that|who|which|in|on|with)",
    r"by itself|of its own|of their own|of one's own",
    r"what (?:is|was|has|it|they|a|an|the) [a-z]+ (?:of|by|from|for|to|with|in|on)",
    r"in line(?! with)",
    r"cards?(?! (?:layout|view))",
    r"knobs?",
    r"in the way of",
    r"of late|at once by",
    r"is said|are said|be said|said of",
    r"must have been|is to be|are to be|was to be",
    r"hardly|whilst|wherein|whereof|thereof|therein|hence",
    r"strangers?",
)
# A report card is a standard term, as are the flag that selects one and the key "cards" in the host protocol.
ALLOWED = re.compile(r"""(?:(?:report|model|hub|dataset|sae|gpu)[ -]|--|["'])cards?|\bCARD\b""", re.IGNORECASE)
MARKER = re.compile("|".join(rf"\b(?:{marker})\b" for marker in MARKERS), re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
# Five times as fast as the module `tokenize`.
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\#(?P<comment>[^\n]*)''',
    re.DOTALL,
)
CODE = re.compile(r"```.*?```|`[^`\n]*`|https?://\S+", re.DOTALL)


class Passage(NamedTuple):
    """A piece of prose and its first line number."""

    line: int
    text: str


@functools.cache
def passages(path: Path) -> tuple[Passage, ...]:
    """Return the prose of a Python or Markdown file."""
    source = path.read_text()
    if path.suffix == ".py":
        return *_comments(source), *_literals(source)
    return (Passage(1, re.sub(r"<!--.*?-->", "", source, flags=re.DOTALL)),)


def _comments(source: str) -> Iterator[Passage]:
    for found in STRING_OR_COMMENT.finditer(source):
        if (comment := found["comment"]) is not None:
            yield Passage(source.count("\n", 0, found.start()) + 1, comment.lstrip("# "))


def _literals(source: str) -> Iterator[Passage]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 3:
            yield Passage(node.lineno, node.value)


def hits(passage: Passage) -> Iterator[str]:
    """Yield each marker in a passage."""
    prose = ALLOWED.sub(" ", CODE.sub(" ", passage.text))
    yield from (found.group().lower() for found in MARKER.finditer(prose))


def n_words(passage: Passage) -> int:
    """Return the number of words in a passage."""
    return len(WORD.findall(CODE.sub(" ", passage.text)))


@functools.cache
def n_words_of(file: Path) -> int:
    """Return the number of words in a file's prose."""
    return sum(map(n_words, passages(file)))


def per_10_000(paths: list[Path]) -> float:
    """Return the number of markers per 10,000 words of prose."""
    return 1e4 * sum(len(hits_of(path)) for path in paths) / max(1, sum(map(n_words_of, paths)))


def files(path: Path) -> list[Path]:
    """Return the Python and Markdown files at a path, except hidden files, build folders and this module."""
    if path.is_file():
        return [path]
    return sorted(
        found
        for found in path.rglob("*")
        if found.suffix in (".py", ".md")
        and found.stem not in ("plain_words", "test_plain_words")
        and not any(part.startswith((".", "build")) for part in found.relative_to(path).parts)
    )


def main() -> None:
    """Print each path's rate and common markers; with --lines, also every hit; with --limit, only higher rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--lines", action="store_true", help="print every hit with its line")
    parser.add_argument(
        "--limit", type=float, help="fail if a path, or a file with at least two hits, has more per 10,000 words"
    )
    args = parser.parse_args()
    found = [file for path in args.paths for file in files(path)]
    if args.lines:
        for file in found:
            sys.stdout.writelines(f"{file}:{line}: {hit}\n" for line, hit in hits_of(file))
    if args.limit is not None:
        sys.exit(excess([*args.paths, *(file for file in found if len(hits_of(file)) > 1)], args.limit))
    for path in args.paths:
        common = Counter(hit for file in files(path) for _, hit in hits_of(file)).most_common(8)
        words = ", ".join(f"{hit} {count}" for hit, count in common)
        sys.stdout.write(f"{per_10_000(files(path)):6.1f} per 10,000 words  {path}  ({words})\n")


@functools.cache
def hits_of(file: Path) -> list[tuple[int, str]]:
    """Return the line number and text of each marker in a file."""
    return [(passage.line, hit) for passage in passages(file) for hit in hits(passage)]


def excess(paths: Iterable[Path], limit: float) -> str | None:
    """Return a message that lists the paths above the limit; None if there are none."""
    rates = {path: per_10_000(files(path)) for path in dict.fromkeys(paths)}
    lines = [f"{rate:6.1f}  {path}" for path, rate in rates.items() if rate > limit]
    return "\n".join([f"More than {limit:g} marker words per 10,000; see --lines:", *lines]) if lines else None


if __name__ == "__main__":
    main()
