"""Runs all checks in turn; a new check is a function here or in a new file, and a line in `CHECKS`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from sae_tui.doctor import (
    bus,
    driver,
    environments,
    links,
    machine,
    queue_service,
    self_test,
    session,
    slurm,
    storage,
    terminal,
    torch_build,
    trust,
)
from sae_tui.doctor.base import SIGNS, Box, Finding
from trainer.contract.wording import plural

Check = Callable[[Box], Iterable[Finding]]
# Checks of what others may do here come first, the slowest one, which imports torch in a process of its own, last.
CHECKS: tuple[Check, ...] = (
    trust.check_owner,
    trust.check_readers,
    trust.check_links,
    trust.check_hook,
    storage.check_file_system,
    storage.check_file_locks,
    storage.check_locks,
    driver.check_driver,
    driver.check_visible,
    driver.check_cards,
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
    queue_service.check_queue_service,
    environments.check_environments,
    environments.check_trainer_code,
    torch_build.check_torch,
)
# Checks that run only on request, since they put work on the GPUs.
PROBES: tuple[Check, ...] = (bus.check_bus,)
SELF_TEST: tuple[Check, ...] = (self_test.check_training,)


def examine(box: Box, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is there; a check that fails yields one as well."""
    for check in checks:
        try:
            yield from check(box)
        except Exception as error:
            subject = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding("warning", subject, f"could not be looked at: {error!r}", "please report this as a bug")


def summary(findings: Iterable[Finding]) -> str:
    """Count the findings by level, like `1 error, 2 warnings, 3 notes, 9 ok`, without levels that have none."""
    counts = Counter(finding.level for finding in findings)
    named = [plural(counts[level], level) for level in ("error", "warning", "note") if counts[level]]
    return ", ".join([*named, f"{counts['ok']} ok"])


def level_words(finding: Finding) -> str:
    """Return the level as a sign and a word, since colour alone is not enough."""
    return f"{SIGNS[finding.level]} {finding.level}"
