"""Checks whether the PyTorch build that the ranks will import supports the GPUs; reads only the build's files."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainer.contract.planning.gpu_vendors import VENDORS, Vendor, vendors_here
from trainer.contract.planning.torch_build import installed_build

OTHER_BUILD = "install another build of torch; pytorch.org/get-started shows the command"


def cuda_problem(vendors: Collection[str] = ()) -> str:
    """Return why no job can use a GPU with the installed PyTorch, or "" if jobs can or if this is unknown.

    `vendors` contains the GPU vendors, by default all vendors whose drivers are installed.
    """
    build = installed_build()
    if build is None:
        return ""
    wanted = [VENDORS[name] for name in vendors or vendors_here() if name in VENDORS]
    if not build.runtime:
        return f'PyTorch {without_cuda(build.version, "GPUs", wanted)}; {OTHER_BUILD}, or choose "cpu"'
    if not wanted or any(vendor.torch_runtime == build.runtime for vendor in wanted):
        return ""
    return f'PyTorch {for_another_vendor(build.version, build.runtime, wanted[0])}, or choose "cpu"'


def without_cuda(version: str, gpus: str, vendors: Sequence[Vendor] = ()) -> str:
    """Return a string like `2.9.0+cpu is built without CUDA, so no job can use the 2 GPUs`."""
    runtimes = " and ".join(dict.fromkeys(vendor.runtime_words for vendor in vendors)) or "CUDA"
    return f"{version} is built without {runtimes}, so no job can use the {gpus}"


def for_another_vendor(version: str, runtime: str, vendor: Vendor) -> str:
    """Return a message about a build for another vendor, with a remedy, like `2.9.0+cu128 is built for CUDA, ...`."""
    words = next((one.runtime_words for one in VENDORS.values() if one.torch_runtime == runtime), runtime)
    reason = f"{version} is built for {words}, so no job can use the {vendor.words} GPUs"
    return f"{reason}; {remedy_for(vendor)}"


def remedy_for(vendor: Vendor) -> str:
    """Return advice to install a PyTorch build for a vendor's GPUs."""
    return f"install a build of torch for {vendor.runtime_words}; pytorch.org/get-started shows the command"
