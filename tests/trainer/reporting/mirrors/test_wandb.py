from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.combinations import slow_except
from support.mirrored import resume, stored, told

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="W&B is not installed")


@pytest.mark.parametrize("mode", slow_except([""], ["", "offline"]))
def test_without_a_login_each_sae_gets_an_offline_run_to_upload_later(
    mode: str, train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    run_dir = train("wandb")
    place = f"offline; `wandb sync {run_dir}/wandb/offline-run-*` uploads it"
    assert told(run_dir) == [("info", f"the metrics are also sent to wandb: {place}")]
    ids = {}
    for label in ("k=2", "k=4"):
        (run,) = [run for run in runs(run_dir) if run["name"] == f"sae {label}"]
        assert run["curves"]["fvu"] == pytest.approx(stored(run_dir, f"fvu@{label}"))
        assert run["curves"]["tokens_per_s"] == pytest.approx(stored(run_dir, "tokens_per_s"))
        assert run["config"]["sae"]["k"] == int(label[-1])
        # A W&B run's summary contains only held-out values.
        assert run["sums_up"] == {"heldout_fvu": True, "heldout_l0": True, "fvu": False, "l0": False}
        ids[label] = run["id"], run["group"]
    assert ids["k=2"][0] != ids["k=4"][0]
    assert ids["k=2"][1] == ids["k=4"][1]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_run_ids(train: Callable[..., Path]) -> None:
    run_dir = train("wandb")
    before = {run["id"] for run in runs(run_dir)}
    resume(run_dir)
    assert {run["id"] for run in runs(run_dir)} == before
    steps = [step for run in runs(run_dir) if run["name"] == "sae k=2" for step in run["curves"]["fvu"]]
    assert sorted(steps) == [5, 10, 15, 20, 25, 30]


def runs(run_dir: Path) -> list[dict[str, Any]]:
    """Return the contents of each run file that `wandb sync` would upload."""
    return [contents(file) for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))]


def contents(file: Path) -> dict[str, Any]:
    run: dict[str, Any] = {"curves": {}, "sums_up": {}}
    for record in records(file.read_bytes()):
        if record.HasField("run") and record.run.display_name:
            config = {one.key: json.loads(one.value_json) for one in record.run.config.update}
            run |= {"id": record.run.run_id, "name": record.run.display_name, "group": record.run.run_group}
            run |= {"config": config}
        if record.HasField("metric") and record.metric.HasField("summary"):
            run["sums_up"][record.metric.name] = record.metric.summary.last and not record.metric.summary.none
        if record.HasField("history"):
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                run["curves"].setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    return run


def records(data: bytes) -> Iterator[Any]:
    """Yield the records of a W&B file: a 7-byte header, then LevelDB's log format with records in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert re.match(rb":W&B", data)
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        # Type 1 is a complete record, and type 4 is the last part of a record.
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""
