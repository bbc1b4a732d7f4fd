"""Runs one group of self-test checks; `python -m trainer self-test --full` runs all groups.

    python tests/benchmarks/gpu_checks.py first|products|curves|rest [--gpus auto:1|cpu]

Like the self-test, the script prints JSON: the device, the number of checks, and the `failed` checks. The exit code is
1 if any check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.ranks.device_choice import parse_target
from trainer.ranks.devices import torch_vendor
from trainer.self_test import memory_need, run
from trainer.self_test.feeding import check_feeding
from trainer.self_test.learning import check_curves, check_recording, check_resuming, check_waits
from trainer.self_test.long_offsets import check_long_offsets
from trainer.self_test.memory_need import USUAL, WIDE, check_memory
from trainer.self_test.products import check_products, check_selections

MAIN_CASES = tuple((size, {"architecture": "topk"}, {}) for size in (USUAL, WIDE))
FIRST, OTHER = ("fp32", "bf16"), ("tf32", "fp16")


def groups(n_steps: int) -> dict[str, tuple[Any, ...]]:
    """Return the checks in each group; learning curves have `n_steps` steps."""
    return {
        "first": (check_waits, partial(check_resuming, half=n_steps // 20), check_memory),
        "products": (check_products, check_selections, check_feeding, partial(check_recording, n_steps=48)),
        "curves": (partial(check_curves, n_steps=n_steps, among=FIRST),),
        "rest": (check_long_offsets, check_memory, partial(check_curves, n_steps=n_steps, among=OTHER)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=groups(0))
    parser.add_argument("--gpus", default="auto:1", help="one GPU, or cpu")
    options = parser.parse_args()
    _, uuids = parse_target(options.gpus)
    is_main = options.group == "first"
    memory_need.CASES = tuple(case for case in memory_need.CASES if (case in MAIN_CASES) == is_main)
    run.FULL = groups(200 if uuids else 20)[options.group]
    found = run.run(VENDORS[torch_vendor()].pin(uuids) if uuids else {}, full=True, tell=lambda check: None)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
