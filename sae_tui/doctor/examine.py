"""Runs all checks in sequence. To add a check, write a function in this folder and list it in `CHECKS`."""

from __future__ import annotations

import math
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from sae_tui.doctor import (
    bus,
    driver,
    environments,
    links,
    machine,
    policy,
    queue_service,
    self_test,
    session,
    slurm,
    storage,
    terminal,
    torch_build,
    trust,
)
from sae_tui.doctor.base import FOLDER_LIMIT_S, SIGNS, CheckedMachine, Finding
from sae_tui.threads import on_thread
from trainer.contract.store.database import OTHER_FOLDER
from trainer.contract.wording import join_words, plural

Check = Callable[[CheckedMachine], Iterable[Finding]]
# Checks for access by other users come first. The slowest check imports torch in a new process and comes last.
CHECKS: tuple[Check, ...] = (
    trust.check_owner,
    trust.check_readers,
    trust.check_links,
    trust.check_hook,
    storage.check_file_system,
    storage.check_file_locks,
    storage.check_store_lock,
    storage.check_locks,
    driver.check_driver,
    driver.check_visible,
    driver.check_gpu_count,
    links.check_nvlink,
    links.check_peers,
    machine.check_shared_memory,
    machine.check_open_files,
    machine.check_locked_memory,
    storage.check_folder,
    storage.check_space,
    storage.check_sqlite,
    terminal.check_colours,
    terminal.check_characters,
    terminal.check_size,
    terminal.check_multiplexer,
    terminal.check_mouse,
    slurm.check_slurm,
    session.check_logout,
    policy.check_policy,
    queue_service.check_queue_service,
    environments.check_environments,
    environments.check_trainer_code,
    torch_build.check_torch,
)
# These checks run only on request, because they use the GPUs.
PROBES: tuple[Check, ...] = (bus.check_bus,)
SELF_TEST: tuple[Check, ...] = (self_test.check_training,)


# Checks that use the data folder. If the folder's disk hangs, the remaining checks in this set are skipped because they
# would hang too.
OF_FOLDER: frozenset[Check] = frozenset(
    (
        trust.check_owner, trust.check_readers, trust.check_links, trust.check_hook, storage.check_file_system,
        storage.check_file_locks, storage.check_store_lock, storage.check_locks, storage.check_folder,
        storage.check_space, policy.check_policy,
    )
)  # fmt: skip
# The time limit in seconds for the next finding of a check. GPU reads have their own limits, 37 s in total. The
# checks in `PROBES` and `SELF_TEST` limit the time for each program they start.
LIMIT_S = 60.0
LIMITS_S: dict[Check, float] = {
    **dict.fromkeys(OF_FOLDER, FOLDER_LIMIT_S),
    storage.check_locks: LIMIT_S,  # reads the GPUs first
    trust.check_readers: 120.0,  # reads the mode of every file
    torch_build.check_torch: 90.0,  # imports torch
    **dict.fromkeys((*PROBES, *SELF_TEST), math.inf),
}


def examine(box: CheckedMachine, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """Yield each finding as soon as it is available; a check that fails or hangs also yields a finding."""
    if box.is_silent:
        yield _silent_folder(box, "")
    left_out = []
    for check in checks:
        if box.is_silent and check in OF_FOLDER:
            left_out.append(_subject(check))
        else:
            yield from _within_limit(box, check)
    if left_out:
        yield Finding("note", "not checked", join_words(left_out), "run the doctor again when the data folder responds")


def _within_limit(box: CheckedMachine, check: Check) -> Iterator[Finding]:
    """Yield a check's findings. The check runs on a separate thread because a disk may never respond."""
    found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for finding in check(box):
                found.put(finding)
        except Exception as error:
            words = f"the check failed: {error!r}"
            found.put(Finding("warning", _subject(check), words, "please report this as a bug"))
        found.put(None)

    on_thread(run)
    limit_s = LIMITS_S.get(check, LIMIT_S)
    try:
        while finding := found.get(timeout=None if math.isinf(limit_s) else limit_s):
            yield finding
    except queue.Empty:
        if check in OF_FOLDER:
            box.is_silent = True
            yield _silent_folder(box, f", during the check of {_subject(check)}")
        else:
            yield Finding(
                "error", _subject(check), f"did not respond within {limit_s:g} s",
                "check whether a disk or a driver hangs, for example with `dmesg`",
            )  # fmt: skip


def _silent_folder(box: CheckedMachine, when: str) -> Finding:
    return Finding(
        "error", "data folder", f"{box.data.root} does not respond within {FOLDER_LIMIT_S:g} s{when}",
        f"check whether its disk or file server hangs, or {OTHER_FOLDER}",
    )  # fmt: skip


def _subject(check: Check) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def summary(findings: Iterable[Finding]) -> str:
    """Count the findings by level, like `1 error, 2 warnings, 3 notes, 9 ok`; omit zero counts except "ok"."""
    counts = Counter(finding.level for finding in findings)
    named = [plural(counts[level], level) for level in ("error", "warning", "note") if counts[level]]
    return ", ".join([*named, f"{counts['ok']} ok"])


def level_words(finding: Finding) -> str:
    """Return the level as a symbol and a word, so that the level is not indicated by colour alone."""
    return f"{SIGNS[finding.level]} {finding.level}"
