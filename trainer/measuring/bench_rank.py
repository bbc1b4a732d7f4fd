"""One rank of a benchmark, started by `trainer.measuring.bench`: runs steps on random data and times each phase."""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd import DeviceType, profiler
from torch.autograd.profiler_util import FunctionEvent

from trainer.activations.batches import Batch
from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths
from trainer.contract.planning import first_look
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.rank_spec import read_spec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import load_job
from trainer.contract.settings.sources import DataShape
from trainer.metrics.pace import memory_bytes
from trainer.parallel.arrange import arrange
from trainer.parallel.base import Parallel
from trainer.parallel.calibrate import copied_per_s, device_name, fastest, seconds_of, synchronise
from trainer.parallel.process_group import World, join
from trainer.parallel.same_kernels import agree
from trainer.ranks.rank import end_with_parent, rank_device
from trainer.runtime import phases
from trainer.runtime.precision import autocast, resolve_precision, set_deterministic, set_matmul_precision
from trainer.saes.kernels import rounded_top_k
from trainer.saes.kernels.rounded_top_k import Factors
from trainer.saes.topk import TopK
from trainer.training.graph_replay import PLAIN_STEPS, replay_for
from trainer.training.learner import Learner, layer_in
from trainer.training.step import cut_of, take_step

# The number of warm-up steps: twice the number of eager steps before a graph capture.
WARM_UP_STEPS = 2 * (PLAIN_STEPS + 1)
N_SAMPLE = 8192
# The number of feature directions per dimension in the random rows; each row is a sparse sum of directions.
DIRECTIONS = 2


class RepeatedStep:
    """Repeats a job's training step, for all its SAEs, on one random batch."""

    def __init__(self, job: JobConfig, d_in: int, d_out: int | None, parallel: Parallel) -> None:
        self._job, self._parallel, self._device = job, parallel, parallel.device
        torch.manual_seed(job.train.seed)
        set_matmul_precision(resolve_precision(job.train.precision, self._device))
        set_deterministic(job.train.deterministic)
        self.learners = [
            Learner(member, d_in, d_out, parallel, layer=layer_in(job, member))
            for member in Layout(job, parallel.world_size).members_by_rank[parallel.rank].values()
        ]
        # The rows of a cross-layer transcoder are joined from those at all layers.
        widths = job.n_layers * d_in, None if d_out is None else job.n_layers * d_out
        x, y = random_pairs(N_SAMPLE, *widths, self._device)
        for learner in self.learners:
            learner.initialise(x, y)
        torch.manual_seed(parallel.data.index)
        layout = Layout(job, parallel.world_size)
        self.cut = cut_of(layout, parallel)
        self.x, self.y = random_pairs(self.cut.largest, *widths, self._device)
        self._total_steps, self._n_taken = layout.total_steps, 0
        for learner in self.learners:
            learner.whole_steps = replay_for(learner, job, parallel)

    def take_plainly(self) -> None:
        """Stop replaying CUDA graphs, because the phases within a replayed step cannot be distinguished."""
        for learner in self.learners:
            learner.whole_steps = None

    def take(self, n_steps: int) -> None:
        """Run steps as `Trainer` does, but without reading data or reporting progress."""
        for _ in range(n_steps):
            take_step(self.learners, self._parallel, self._n_taken % self._total_steps, self._batches())
            self._n_taken += 1

    def _batches(self) -> Iterator[Batch]:
        for _, length, of_all in self.cut.token_slices:
            x = self.x[:length]
            yield Batch([(x, x if self.y is self.x else self.y[:length])], of_all)


def random_pairs(n_tokens: int, d_in: int, d_out: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: the same tensor for an SAE, different tensors for a transcoder."""
    x = random_rows(n_tokens, d_in, device)
    return x, x if d_out is None else random_rows(n_tokens, d_out, device)


def random_rows(n_tokens: int, width: int, device: torch.device) -> Tensor:
    """Return random rows [n_tokens, width], each a sparse sum of fixed directions."""
    generator = torch.Generator(device).manual_seed(0)
    directions = torch.randn(DIRECTIONS * width, width, device=device, generator=generator)
    share = min(1.0, 16 / len(directions))
    used = torch.rand(n_tokens, len(directions), device=device) * (
        torch.rand(n_tokens, len(directions), device=device) < share
    )
    return used @ directions


def phases_ms(profiled: Iterable[FunctionEvent]) -> dict[str, float]:
    """Return the duration of each phase in a profile, in ms: kernel time if there are kernels, otherwise host time.

    A kernel belongs to the phase in which it was launched, regardless of the thread, because autograd launches backward
    kernels from a separate thread. A kernel carries the id of the CUDA or HIP call that launched it, even if PyTorch
    did not make the call.
    """
    events = list(profiled)
    of_host = [event for event in events if event.device_type == DeviceType.CPU]
    calls = {event.id: event.time_range.start for event in of_host if event.name.startswith(("cu", "hip"))}
    kernels = [
        (calls[event.id], event.time_range.elapsed_us())
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation and event.id in calls
    ]

    def ms(phase: str) -> float:
        spans = [event.time_range for event in of_host if event.name == phase]
        if not kernels:
            return float(sum(span.elapsed_us() for span in spans)) / 1000
        return float(sum(us for start, us in kernels if any(span.start <= start < span.end for span in spans))) / 1000

    encoder = ms(phases.ENCODER)
    return {
        "forward_encode": encoder,
        "forward_rest": ms(phases.FORWARD) - encoder,
        "backward": ms(phases.BACKWARD),
        "metrics": ms(phases.METRICS),
        "exchange": ms(phases.EXCHANGE),
        "update": ms(phases.UPDATE),
    }


def profile_phases(steps: RepeatedStep, device: torch.device, n_steps: int) -> dict[str, float]:
    """Return the mean duration of each phase over `n_steps` steps, in ms."""
    steps.take_plainly()
    # `torch.profiler.profile` would also load torch's compiler, which takes two seconds.
    with profiler.profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None) as profile:
        steps.take(n_steps)
        synchronise(device)
    return {name: ms / n_steps for name, ms in phases_ms(profile.function_events).items()}


def time_steps(steps: RepeatedStep, device: torch.device, n_steps: int) -> list[float]:
    """Return each step's duration in seconds; on a GPU, only the mean, since the host synchronises only at the end."""
    if device.type == "cuda":
        return [seconds_of(lambda: steps.take(n_steps), device) / n_steps]
    return [seconds_of(lambda: steps.take(1), device) for _ in range(n_steps)]


def floor(steps: RepeatedStep, device: torch.device, job: JobConfig) -> dict[str, float]:
    """Return a lower bound on the step time in ms, and the times for the encoder matmul and for memory traffic.

    The bound is the longer of the two times. The memory traffic time is the number of bytes divided by the bandwidth
    measured for a large copy.
    """
    micro_batches, precision = len(steps.cut.token_slices), resolve_precision(job.train.precision, device)
    product_s = traffic = 0.0
    for learner in steps.learners:
        sae = learner.sae
        with torch.no_grad(), autocast(precision, device):
            pre_acts = torch.addmm(sae.b_enc, steps.x, sae.W_enc)
            factors = Factors(steps.x, sae.W_enc, sae.b_enc)
            is_screened = isinstance(sae, TopK) and rounded_top_k.pays(
                factors, first_look.EXACT * first_look.n_seen(sae.k, sae.latents.group.size)
            )
            # Convert and allocate tensors in advance, so that only the matmul is timed.
            narrow = torch.bfloat16 if is_screened else pre_acts.dtype
            operands = (tensor.to(narrow) for tensor in (sae.b_enc, steps.x, sae.W_enc))
            product = functools.partial(torch.addmm, *operands, out=pre_acts.to(narrow))
            product_s += micro_batches * fastest(product, device)
        # Pre-activations are written once and read once.
        traffic += micro_batches * 2 * pre_acts.nbytes
        # Weights, gradients and optimizer state are each read once and written once.
        for parameter in sae.parameters():
            state = [value for value in learner.optimizer.state[parameter].values() if value.numel() > 1]
            traffic += 2 * sum(value.nbytes for value in (parameter, parameter, *state))
    bandwidth = copied_per_s(device)
    return {
        "encoder_product_ms": 1000 * product_s,
        "traffic_bytes": traffic,
        "bandwidth_bytes_per_s": bandwidth,
        "traffic_ms": 1000 * traffic / bandwidth,
        "floor_ms": 1000 * max(product_s, traffic / bandwidth),
    }


def measure_steps(job: JobConfig, d_in: int, d_out: int | None, n_steps: int, parallel: Parallel) -> dict[str, Any]:
    """Measure `n_steps` steps and return the results that `bench` shows; every rank runs the same steps."""
    device, steps = parallel.device, RepeatedStep(job, d_in, d_out, parallel)
    time_steps(steps, device, WARM_UP_STEPS)
    sent_before = _sent_bytes(parallel)
    step_s = statistics.median(time_steps(steps, device, n_steps))
    sent = _sent_bytes(parallel)
    peak_bytes = memory_bytes(device)
    of_phases = profile_phases(steps, device, n_steps)
    least = floor(steps, device, job)
    tokens = Layout(job, parallel.world_size).tokens_per_step
    sae = steps.learners[0].sae
    return {
        "device": device_name(device),
        "ranks": parallel.world_size,
        "torch": str(torch.__version__),
        "precision": resolve_precision(job.train.precision, device),
        "architecture": job.sae.architecture,
        "optimizer": job.train.optimizer,
        "d_in": d_in,
        "d_out": d_out,
        "d_sae": sae.d_sae,
        "n_saes": len(steps.learners),
        "tokens_per_step": tokens,
        "steps": n_steps,
        "step_ms": 1000 * step_s,
        "tokens_per_s": tokens / step_s,
        "phases_ms": of_phases,
        "floor": least,
        "of_floor": least["floor_ms"] / (1000 * step_s),
        "peak_memory_bytes": peak_bytes,
        "sent_bytes": None if sent is None or sent_before is None else (sent - sent_before) / n_steps,
    }


def _sent_bytes(parallel: Parallel) -> int | None:
    """Return the number of bytes that this rank has sent, or None if one of its groups does not count bytes."""
    counts = [group.sent_bytes for group in {parallel.world, parallel.data, parallel.latents}]
    return None if None in counts else sum(filter(None, counts))


def _agree(world: World, job: JobConfig) -> None:
    """Make all ranks use the same kernels, as in a run; if kernels are disabled, print why."""
    compiles = world.group.index == 0
    agree(world.group, world.device, job, compiles=compiles, report=print)


def main(spec_file: Path, d_in: int, d_out: int, n_steps: int) -> None:
    """Measure a job; rank 0 writes the result to `found.json` next to the job file."""
    end_with_parent()
    spec, rank = read_spec(spec_file), int(os.environ["RANK"])
    job = load_job(RunPaths(spec.run_dir).job_file)
    meeting_place = RunPaths(spec.run_dir).attempt(1) / "rendezvous"
    world = join(rank_device(spec, rank), rank, spec.world_size, meeting_place, on_one_host=spec.on_one_host)
    settled, parallel, plan = arrange(world, job, DataShape(d_in, d_out or None, 0))
    if world.device.type == "cuda":
        _agree(world, settled)
    figures = measure_steps(settled, d_in, d_out or None, n_steps, parallel) | {
        "plan": plan,
        "expected_step_ms": 1000 * plan.step_s,
    }
    if rank == 0:
        (spec.run_dir / "found.json").write_bytes(msgspec.json.encode(figures))
    world.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    except (UserError, torch.OutOfMemoryError) as error:
        sys.exit(str(error).splitlines()[0])
