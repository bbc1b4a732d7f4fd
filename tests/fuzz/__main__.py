"""Fuzzes each reader in turn and adds failing inputs to the corpus: `PYTHONPATH=tests python -m fuzz --minutes 30`."""

from __future__ import annotations

import argparse
import hashlib
import time
import traceback
from collections import Counter

from fuzz.inputs import inputs
from fuzz.judged import home, judge
from fuzz.readers import READERS, Reader
from fuzz.uses import CORPUS, Home
from hypothesis import HealthCheck, Phase, given, seed, settings

TURN = 500


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the same seed gives the same inputs")
    parser.add_argument("--only", default="", help="only readers whose name contains this text")
    flags = parser.parse_args()
    readers = [reader for reader in READERS if flags.only in reader.name]
    until, counts, turn = time.monotonic() + 60 * flags.minutes, Counter[str](), flags.seed
    reported: set[str] = set()
    while time.monotonic() < until:
        for reader in readers:
            if time.monotonic() < until:
                with home() as place:
                    _take_turn(reader, place, turn, counts, reported)
        turn += 1
    for name, count in counts.items():
        print(f"{count:8d}  {name}")
    print(f"{counts.total():8d}  examples, {len(reported)} findings, seeds {flags.seed} to {turn - 1}")


def _take_turn(reader: Reader, place: Home, number: int, counts: Counter[str], known: set[str]) -> None:
    last = b""

    @seed(number)
    @settings(
        max_examples=TURN, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
    )  # fmt: skip
    @given(inputs(CORPUS / reader.seeds))
    def read(content: bytes) -> None:
        nonlocal last
        last = content
        counts[reader.name] += 1
        judge(reader, place, content)

    try:
        read()
    except Exception as error:
        _tell(reader, last, error, known)


def _tell(reader: Reader, content: bytes, error: Exception, known: set[str]) -> None:
    """Report each error only once per line of code, and store the smallest failing input, which was tried last."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f"{at.filename}:{at.lineno}" for at in reversed(frames) if "/site-packages/" not in at.filename), "")
    if (summary := f"{reader.name}: {type(error).__name__} at {where}") in known:
        return
    known.add(summary)
    file = CORPUS / reader.seeds / f"found-{hashlib.sha256(content).hexdigest()[:8]}"
    if len(content) < 6000:
        file.write_bytes(content)
    print(f"{summary}: {error!s:.300}\n    {content[:200]!r} ({file.name})", flush=True)


if __name__ == "__main__":
    main()
