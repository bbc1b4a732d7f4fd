"""The result of inspecting stored activations: statistics, followed by each finding with its remedy."""

from __future__ import annotations

import textwrap

from sae_tui.format import fit, visible
from sae_tui.jobs.launch.inspecting import Inspected
from sae_tui.widgets.lines import Line

_STYLES = {"error": "bad", "warning": "warn"}


def inspection_lines(place: str, inspected: Inspected, width: int) -> list[Line]:
    """Return the inspection wrapped to a width, with every finding in full."""
    looked = "all" if inspected.n_looked_at == inspected.n_tokens else f"{inspected.n_looked_at:,} of them checked"
    facts = (
        f"{inspected.n_tokens:,} rows ({looked}), d_in {inspected.d_in}, {inspected.dtype}",
        f"median norm {inspected.median_norm:.4g}, largest {inspected.largest_norm:.4g}; gamma {inspected.gamma:.2f}",
    )
    lines: list[Line] = [((fit(place, width), "title"),)]
    lines += [((text, "text"),) for fact in facts for text in _wrap(fact, width)]
    for one in inspected.findings:
        remedy = f"; {one.remedy}" if one.remedy else ""
        style = _STYLES.get(one.severity, "text")
        lines += [(), *(((text, style),) for text in _wrap(f"{one.severity}: {one.sentence}{remedy}", width))]
    return lines if inspected.findings else [*lines, (), (("No problems found.", "good"),)]


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(visible(text), max(10, width), break_on_hyphens=False)
