"""Models a training step for every architecture on an H200: operations, kernels, bytes and milliseconds.

    PYTHONPATH=tests python tests/benchmarks/gpu_step.py [ARCHITECTURE ...] [--top N]

The script needs no GPU. The GPU code runs on tensors that use no memory (`tests/support/fake_gpu.py`), and a roofline
model estimates the times (`tests/support/roofline.py`, which states its accuracy). `tests/benchmarks/train_step.py`
measures steps on a real GPU. Shape A has d_in 2304, d_sae 65536 and k 64. Shape B has d_in 768, d_sae 24576 and k 32.
Shapes A and B have 4,096 tokens in bf16.
"""

from __future__ import annotations

import argparse

from support.fake_gpu import job_of
from support.roofline import cost, floor_s, modelled
from support.step_ops import recorded_step
from support.step_table import ARCHITECTURES, cases

from trainer.contract.planning.graph_capture import pays
from trainer.contract.planning.workload import Layout

SHAPES = {"A": ({"d_sae": 65536, "k": 64}, 2304), "B": ({"d_sae": 24576, "k": 32}, 768)}
N_TOKENS = 4096
HEADER = "| | ops | launches | GB | passes | update | GPU ms | host ms | step ms | of floor |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=ARCHITECTURES)
    parser.add_argument(
        "--top", type=int, default=0, metavar="N", help="also print the N slowest operations of each step"
    )
    args = parser.parse_args()
    print(HEADER, "|" + "---|" * 10, sep="\n")
    for architecture in args.architectures:
        for shape in SHAPES:
            for case in cases(architecture):
                show(architecture, shape, case, args.top)


def show(architecture: str, shape: str, case: str, top: int) -> None:
    sae, d_in = SHAPES[shape]
    job = job_of(sae | {"architecture": architecture}, {"precision": "bf16", "batch_size": N_TOKENS})
    step = recorded_step(job, d_in, dead=case == "auxk", dense=case == "dense")
    is_recorded = case != "dense" and pays(Layout(job, 1), d_in, d_in, precision="bf16")
    m = modelled(step, is_recorded=is_recorded)
    share = floor_s(d_in, int(sae["d_sae"]), N_TOKENS) / m.step_s
    label = f"{shape} {architecture}, {case}" + (", recorded" if is_recorded else "")
    ms = [f"{1e3 * seconds:.2f}" for seconds in (m.passes_s, m.update_s, m.gpu_s, m.host_s, m.step_s)]
    print(f"| {label} | {m.n_ops} | {m.launches} | {m.bytes / 1e9:.1f} | {' | '.join(ms)} | {share:.0%} |", flush=True)
    for op in sorted(step.ops, key=lambda one: -cost(one).seconds)[:top]:
        shapes = " ".join("x".join(map(str, one.shape)) for one in (*op.reads, *op.writes)[:4])
        print(f"    {1e3 * cost(op).seconds:7.3f} ms x{cost(op).launches:2d} {op.name} {shapes} {op.at}")


if __name__ == "__main__":
    main()
