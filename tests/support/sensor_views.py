"""Prints every view and output that shows a simulated GPU's sensor, as JSON: `python -m support.sensor_views NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from support.reference import pages

from sae_tui.cli_commands.prometheus import gpu_metrics
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.simulated import Simulated
from sae_tui.hosts.protocol import RemoteGpus, decode, remote_gpu
from sae_tui.panels.gpu_cards import card
from sae_tui.panels.gpu_lines import gpu_lines
from sae_tui.panels.gpu_map import map_grid, map_lines
from sae_tui.panels.gpu_page import facts
from sae_tui.panels.gpu_row import GpuRow
from sae_tui.widgets.lines import Line


class _Metrics(Collector):
    def __init__(self, sample: GpuSample) -> None:
        self._sample = sample

    def collect(self) -> Iterable[Metric]:
        return gpu_metrics([self._sample], {})


def views(name: str) -> dict[str, str]:
    """Return the text of each view of an idle simulated GPU, and the lines about the sensor in each JSON output."""
    source = Simulated(1, clock=lambda: 0.0)
    sample = source.sample(0, processes=True)
    sent = decode(msgspec.json.encode(RemoteGpus((remote_gpu(sample, "free", "dim"),))))
    assert isinstance(sent, RemoteGpus)
    here, far = _row(sample), _row(sent.gpus[0].sample(0.0))
    assert sample.condition is not None
    impossible: dict[str, Any] = {name: 1e9}
    return {
        "list": _text(gpu_lines([here], [here], 120)),
        "list at 60": _text(gpu_lines([here], [here], 60)),
        "two lines": _text(gpu_lines([here], [here], 120, 2)),
        "far": _text(gpu_lines([far], [far], 120)),
        "card": _text(card(here, 60, 4)),
        "small card": _text(card(here, 60, 2)),
        "map": _text(map_lines([here], 40, map_grid(1, 40, 4))),
        "page": str([entry for group in facts(sample, source.details(0, sample)) for entry in group]),
        "impossible": str(getattr(replace(sample.condition, **impossible), name)),
        "prometheus": generate_latest(_Metrics(sample)).decode(),
        "reference": pages()["json.md"],
    }


def _row(sample: GpuSample) -> GpuRow:
    return GpuRow(sample, "free", "dim", lambda name, n: [None] * n)


def _text(lines: Iterable[Line]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


if __name__ == "__main__":
    print(json.dumps(views(sys.argv[1])))
