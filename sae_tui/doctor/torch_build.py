"""Checks, in a separate process, whether the torch that ranks import works with the driver and the GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sae_tui.doctor.base import CheckedMachine, Finding, GpuReadings
from sae_tui.doctor.environments import lack_of
from sae_tui.gpu import vendor_to_name
from sae_tui.jobs.launch.pytorch import OTHER_BUILD, for_another_vendor, without_cuda
from trainer.contract.extras import install, missing_of_trainer
from trainer.contract.json_file import decode_as
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor
from trainer.contract.wording import join_words, plural

# The time limit for importing torch; the first import from a network disk takes half a minute.
LIMIT_S = 60.0
# Compute capabilities of GPUs, such as GeForce models, whose fp64 speed is 1/32 or 1/64 of their fp32 speed.
_SLOW_AT_FP64 = {(6, 1), (7, 5), (8, 6), (8, 9), (12, 0), (12, 1)}
_ADAM_IN_FP32 = (2, 8)
# Skip garbage collection and torch's shutdown, which are not needed here and take a third of the time.
_ASK = """
import gc
gc.disable()
import importlib.metadata, json, os, torch
def installed(names):
    return next((d.version for d in importlib.metadata.distributions() if (d.name or "").startswith(names)), None)
hip = getattr(torch.version, "hip", None)
numbers = range(torch.cuda.device_count() if hip and torch.cuda.is_available() else 0)
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print(json.dumps({
    "version": str(torch.__version__), "cuda": torch.version.cuda, "hip": hip,
    "amd_archs": [torch.cuda.get_device_properties(number).gcnArchName for number in numbers],
    "available": torch.cuda.is_available(),
    "gpus": torch.cuda.device_count(), "archs": torch.cuda.get_arch_list() if torch.cuda.is_available() else [],
    "nccl": list(torch.cuda.nccl.version())[:3] if nccl else None,
    "nccl_installed": installed("nvidia-nccl"), "triton": installed(("triton", "pytorch-triton"))}), flush=True)
os._exit(0)
"""


class TorchBuild(msgspec.Struct, frozen=True):
    """The torch that ranks import. `cuda`, `hip` (ROCm) and `nccl` are the versions it was built with.

    `nccl_installed` is the installed NCCL package's version; `amd_archs` are AMD GPU architectures.
    """

    version: str
    cuda: str | None
    available: bool
    gpus: int
    archs: list[str]
    nccl: list[int] | None
    nccl_installed: str | None
    triton: str | None
    hip: str | None = None
    amd_archs: list[str] = []

    @property
    def runtime(self) -> str:
        """The runtime torch was built for, in the format of `Vendor.torch_runtime`, or "" for a CPU build."""
        return "hip" if self.hip else "cuda" if self.cuda else ""

    @property
    def built_for(self) -> str:
        """The runtime torch was built for, and its version, in words."""
        return (
            f"built for ROCm {self.hip}"
            if self.hip
            else f"built for CUDA {self.cuda}"
            if self.cuda
            else "built without CUDA"
        )


def check_torch(box: CheckedMachine) -> Iterator[Finding]:
    """Check whether torch, NCCL and Triton work with the driver and the GPUs."""
    if not box.python and (missing := missing_of_trainer()):
        sentence = f"the app shows GPUs and jobs, but training needs {join_words(missing)}"
        yield Finding("error", "torch", sentence, f"run `{install('train')}`")
        return
    if lack_of(box):
        return
    build, failure = _ask(box)
    if build is None:
        remedy = (
            f"run `{box.python_path} -c 'import torch'` to see why; `pip install --force-reinstall torch` replaces it"
        )
        yield Finding("error", "torch", f"it cannot be imported: {failure}", remedy)
        return
    gpus = box.gpus
    if not gpus.cuda or not gpus.samples:
        yield Finding("ok", "torch", f"{build.version}, {build.built_for}; jobs run on the CPU here")
        return
    vendor = next((one for one in _vendors(gpus) if one.torch_runtime == build.runtime), None)
    yield _suits_driver(box, build, gpus, vendor)
    if vendor is None:
        return
    yield from _knows_gpus(build, gpus)
    yield from _updates_fast(build, gpus)
    if len(gpus.samples) > 1:
        yield _exchanges(build)
    if build.triton is None:
        sentence = "it is not installed, so sparse steps on a GPU are slower"
        yield Finding("note", "Triton", sentence, "run `pip install triton`")


def _ask(box: CheckedMachine) -> tuple[TorchBuild | None, str]:
    """Import torch in a separate process; return its build, or None and the cause of failure."""
    answer, failure = box.trainer("-c", _ASK, limit_s=LIMIT_S)
    if failure:
        return None, failure
    try:
        return decode_as(answer.rpartition("\n")[2], TorchBuild), ""
    except ValueError:
        return None, "its output is not valid JSON"


def _vendors(gpus: GpuReadings) -> list[Vendor]:
    """Return the GPUs' vendors."""
    names = dict.fromkeys(sample.vendor for sample in gpus.samples if sample.vendor)
    return [VENDORS[name] for name in names] or [vendor_to_name(gpus.source_name)]


def _suits_driver(box: CheckedMachine, build: TorchBuild, gpus: GpuReadings, vendor: Vendor | None) -> Finding:
    """Check that torch is built for these GPUs, and that the driver supports its CUDA version.

    A driver supports every minor version of all CUDA major versions up to its own. `vendor` is the vendor whose GPUs
    torch is built for, or None if the machine has no such GPUs.
    """
    driver = gpus.facts.cuda
    if not build.runtime:
        return Finding(
            "error", "torch", without_cuda(build.version, _number_of_gpus(gpus), _vendors(gpus)), OTHER_BUILD
        )
    if vendor is None:
        sentence, _, remedy = for_another_vendor(build.version, build.runtime, _vendors(gpus)[0]).partition("; ")
        return Finding("error", "torch", sentence, remedy)
    if build.cuda and driver and int(build.cuda.partition(".")[0]) > driver[0]:
        sentence = (
            f"{build.version} is built for CUDA {build.cuda}, but the driver supports at most {driver[0]}.{driver[1]}"
        )
        return Finding("error", "torch", sentence, f"update the driver, or install a build for CUDA {driver[0]}")
    if not build.available:
        remedy = f"run `{box.python_path} -c 'import torch; torch.cuda.init()'` to see why"
        for variable, visible in vendor.limits(box.environ).items():
            remedy = f'unset {variable}, which is "{visible}"'
        return Finding("error", "torch", f"{build.version} sees none of the {_number_of_gpus(gpus)}", remedy)
    runs = f", which this driver supports (up to {driver[0]}.{driver[1]})" if driver and build.cuda else ""
    return Finding("ok", "torch", f"{build.version}, {build.built_for}{runs}")


def _knows_gpus(build: TorchBuild, gpus: GpuReadings) -> Iterator[Finding]:
    """Report the GPUs that torch cannot use: it lacks both compiled code for their major compute capability and PTX.

    Code for AMD GPUs runs on a single architecture only.
    """
    lacking = dict.fromkeys(arch.partition(":")[0] for arch in build.amd_archs)
    if build.archs and (without_code := [arch for arch in lacking if arch not in build.archs]):
        sentence = f"{build.version} has no code for {join_words(without_code)}, only for {' '.join(build.archs)}"
        yield Finding("error", "torch", sentence, OTHER_BUILD)
    unknown = {
        index: capability
        for index, capability in enumerate(gpus.facts.capabilities)
        if capability and build.archs and not any(_covers(arch, capability) for arch in build.archs)
    }
    if unknown:
        major, minor = next(iter(unknown.values()))
        unknown_gpus = join_words([f"GPU {index}" for index in unknown])
        only = f"only for {' '.join(build.archs)}"
        sentence = f"{build.version} has no code for {unknown_gpus} (sm_{major}{minor}), {only}"
        yield Finding("error", "torch", sentence, OTHER_BUILD)


def _updates_fast(build: TorchBuild, gpus: GpuReadings) -> Iterator[Finding]:
    """Recommend a newer torch if the installed fused Adam computes in fp64 and a GPU is slow at fp64."""
    numbers = build.version.split(".")[:2]
    if not all(map(str.isdecimal, numbers)) or tuple(map(int, numbers)) >= _ADAM_IN_FP32:
        return
    slow = [index for index, capability in enumerate(gpus.facts.capabilities) if capability in _SLOW_AT_FP64]
    if slow:
        are_slow = f"{join_words([f'GPU {index}' for index in slow])} {'is' if len(slow) == 1 else 'are'} slow at fp64"
        sentence = f"Adam in torch {build.version} computes in fp64, and {are_slow}"
        yield Finding("note", "torch", sentence, "install torch 2.8 or newer, whose Adam computes in fp32")


def _covers(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether code for `sm_86`, `sm_90a` or `compute_90` runs on a GPU with this capability."""
    kind, _, number = arch.partition("_")
    digits = number.rstrip("af")
    if not digits.isdecimal():
        return False
    own = int(digits[:-1] or 0), int(digits[-1])
    if digits != number:
        return own == capability
    return own <= capability and (kind == "compute" or own[0] == capability[0])


def _exchanges(build: TorchBuild) -> Finding:
    """Check NCCL, or AMD's RCCL: the version loaded by torch may differ from the version it was compiled with."""
    name = "RCCL" if build.hip else "NCCL"
    if build.nccl is None:
        sentence = f"torch {build.version} is built without {name}, which jobs on several GPUs need"
        return Finding("error", name, sentence, OTHER_BUILD)
    version = ".".join(map(str, build.nccl))
    installed = build.nccl_installed
    if not build.hip and installed and installed.split(".")[:2] != version.split(".")[:2]:
        sentence = f"torch is built with {version}, but {installed} is installed"
        package = f"nvidia-nccl-cu{(build.cuda or '').partition('.')[0]}"
        return Finding("warning", "NCCL", sentence, f"run `pip install {package}=={version}`")
    return Finding("ok", name, f"{version}, the version that torch was built with")


def _number_of_gpus(gpus: GpuReadings) -> str:
    return plural(len(gpus.samples), "GPU")
