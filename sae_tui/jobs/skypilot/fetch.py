"""Copies a folder from a rented machine over ssh.

`python -m sae_tui.jobs.skypilot.fetch NAME THERE HERE [EXCLUDED ...]` needs only `tar` on the machine. The machine is
not trusted: only files and folders inside HERE are written, and links are left out, because they could lead anywhere.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from trainer.contract.exits import Exit
from trainer.contract.output import complain
from trainer.contract.paths import private_folder

# ssh asks no question, and notices within a minute that the machine is gone.
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)


def fetch_words(name: str, there: str, here: Path, *excluded: str) -> list[str]:
    """Return the command that copies a folder here; `there` is relative to the home folder on the machine."""
    return [sys.executable, "-P", "-m", "sae_tui.jobs.skypilot.fetch", name, there, str(here), *excluded]


def fetch(name: str, there: str, here: Path, excluded: Sequence[str]) -> str:
    """Copy a folder; return why that failed, or ""."""
    options = [f"--exclude=./{one}" for one in excluded]
    words = ["tar", "-C", there, *options, "-cf", "-", "."]
    process = subprocess.Popen([*SSH, name, shlex.join(words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout
    private_folder(here)
    try:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.isreg() or member.isdir():
                    archive.extract(member, here, filter=_private)
    except (tarfile.TarError, OSError) as error:
        process.kill()
        process.wait()
        return str(error)
    # A machine that sends anything after the archive waits for a reader.
    with contextlib.suppress(OSError):
        process.stdout.close()
    return "" if process.wait() == 0 else f"ssh ended with exit code {process.returncode}"


def _private(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Refuse paths outside the folder, and make the copy private."""
    kept = tarfile.data_filter(member, folder)
    return kept and kept.replace(mode=0o700 if member.isdir() else 0o600, deep=False)


def main(arguments: Sequence[str]) -> int:
    name, there, here, *excluded = arguments
    os.umask(0o077)
    if problem := fetch(name, there, Path(here), excluded):
        complain(f"{problem}\n")
        return Exit.FAILED
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
