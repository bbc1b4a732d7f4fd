"""Tests for torch builds that are not installed here, simulated by fake packages; one test uses the real torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cards import Cards

from sae_tui.doctor.base import Finding
from sae_tui.doctor.torch_build import check_torch
from sae_tui.gpu.base import GpuFacts

TORCH = """
from types import SimpleNamespace as N
__version__ = {version!r}
version = N(cuda={cuda!r}, hip={hip!r})
distributed = N(is_available=lambda: True, is_nccl_available=lambda: {nccl!r} is not None)
cuda = N(is_available=lambda: {available!r}, device_count=lambda: 2, get_arch_list=lambda: {archs!r},
         nccl=N(version=lambda: {nccl!r}),
         get_device_properties=lambda index: N(gcnArchName=("gfx942:sramecc+:xnack-", "gfx1031")[index]))
"""
ON_12 = GpuFacts(driver="570.1", cuda=(12, 8), capabilities=((9, 0), (9, 0)))


@pytest.fixture
def torch_says(sandbox, tmp_path: Path) -> Callable[..., list[Finding]]:
    def check(
        cuda="12.8", nccl=(2, 27, 5), available=True, archs=("sm_80", "sm_90"), *, gpus=2, installed="", hip=None,
        version="2.9.0", facts=ON_12, source="nvml", triton="triton", **environ,
    ) -> list[Finding]:  # fmt: skip
        site = tmp_path / "site"
        (site / "torch").mkdir(parents=True, exist_ok=True)
        text = TORCH.format(version=version, cuda=cuda, hip=hip, nccl=nccl, available=available, archs=list(archs))
        (site / "torch/__init__.py").write_text(text)
        for name, version in ((triton, "3.5.0"), ("nvidia_nccl_cu12", installed)):
            if version:
                info = site / f"{name}-{version}.dist-info"
                info.mkdir(exist_ok=True)
                (info / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
        source_gpus = Cards(gpus, facts if source == "nvml" else GpuFacts(driver="6.12"))
        source_gpus.name = source
        box = sandbox.box(source_gpus, PYTHONPATH=str(site), **environ)
        return list(check_torch(box))

    return check


def test_a_build_that_matches_the_driver_and_the_gpus_is_ok(torch_says) -> None:
    torch, nccl = torch_says()
    assert (torch.level, nccl.level) == ("ok", "ok")
    assert torch.sentence == "2.9.0, built for CUDA 12.8, which this driver supports (up to 12.8)"
    assert nccl.sentence.startswith("2.27.5")


@pytest.mark.parametrize(
    ("version", "capability", "advised"),
    [("2.7.1", (8, 9), True), ("2.8.0", (8, 9), False), ("2.7.1+cu128", (9, 0), False), ("next", (8, 9), False)],
)
def test_a_newer_torch_is_advised_for_gpus_slow_at_fp64(torch_says, version, capability, advised) -> None:
    facts = GpuFacts(driver="570.1", cuda=(12, 8), capabilities=(capability, (9, 0)))
    notes = [finding for finding in torch_says(version=version, facts=facts) if finding.level == "note"]
    assert [one.sentence for one in notes] == [
        f"Adam in torch {version} computes in fp64, and GPU 0 is slow at fp64"
    ] * advised


def test_a_build_for_a_newer_minor_version_of_cuda_is_ok(torch_says) -> None:
    assert torch_says(cuda="12.9")[0].level == "ok"


def test_a_build_for_a_newer_major_version_of_cuda_is_an_error(torch_says) -> None:
    finding = torch_says(cuda="13.0", available=False)[0]
    assert finding.level == "error"
    assert finding.sentence == "2.9.0 is built for CUDA 13.0, but the driver supports at most 12.8"
    assert finding.remedy == "update the driver, or install a build for CUDA 12"


def test_a_build_without_cuda_on_a_machine_with_gpus_is_an_error(torch_says) -> None:
    (finding,) = torch_says(cuda=None, nccl=None, available=False)
    assert finding.level == "error"
    assert "no job can use the 2 GPUs" in finding.sentence


def test_hidden_gpus_are_reported_with_the_variable_hiding_them(torch_says) -> None:
    finding = torch_says(available=False, CUDA_VISIBLE_DEVICES="1,GPU-0")[0]
    assert finding.level == "error"
    assert finding.sentence.endswith("sees none of the 1 GPU")
    assert finding.remedy == 'unset CUDA_VISIBLE_DEVICES, which is "1,GPU-0"'


@pytest.mark.parametrize(
    ("archs", "known"),
    [
        (("sm_80", "sm_90"), True),
        (("sm_90a",), True),
        (("sm_70", "compute_80"), True),
        (("sm_80",), False),
        (("sm_100", "compute_100"), False),
        (("sm_89a",), False),
    ],
)
def test_gpus_for_which_torch_has_no_code_are_an_error(torch_says, archs, known) -> None:
    lacking = [finding for finding in torch_says(archs=archs) if "has no code" in finding.sentence]
    assert bool(lacking) is not known
    assert all("GPU 0 and GPU 1 (sm_90)" in finding.sentence for finding in lacking)


def test_an_nccl_other_than_the_one_torch_was_built_with_is_a_warning(torch_says) -> None:
    nccl = torch_says(installed="2.21.5")[1]
    assert nccl.level == "warning"
    assert nccl.remedy == "run `pip install nvidia-nccl-cu12==2.27.5`"


def test_a_different_patch_version_of_nccl_is_ok(torch_says) -> None:
    assert torch_says(installed="2.27.7")[1].level == "ok"


def test_nccl_is_required_only_for_several_gpus(torch_says) -> None:
    assert torch_says(nccl=None)[1].level == "error"
    assert len(torch_says(nccl=None, gpus=1)) == 1


def test_a_rocm_build_on_a_machine_with_amd_gpus_is_ok(torch_says) -> None:
    rocm = {"cuda": None, "hip": "6.4.43482", "source": "amdsmi", "triton": "pytorch_triton_rocm"}
    torch, rccl = torch_says(**rocm, archs=("gfx942", "gfx1031"))
    assert (torch.level, torch.sentence) == ("ok", "2.9.0, built for ROCm 6.4.43482")
    assert (rccl.subject, rccl.level) == ("RCCL", "ok")
    unknown = torch_says(**rocm, archs=("gfx90a", "gfx942"))[1]
    assert unknown.level == "error"
    assert unknown.sentence == "2.9.0 has no code for gfx1031, only for gfx90a gfx942"
    hidden = torch_says(**rocm, available=False, HIP_VISIBLE_DEVICES="0")[0]
    assert hidden.remedy == 'unset HIP_VISIBLE_DEVICES, which is "0"'


def test_a_build_for_another_vendors_gpus_is_an_error_with_its_remedy(torch_says) -> None:
    (cuda,) = torch_says(source="amdsmi")
    assert cuda.level == "error"
    assert cuda.sentence == "2.9.0 is built for CUDA, so no job can use the AMD GPUs"
    assert cuda.remedy == "install a build of torch for ROCm; pytorch.org/get-started shows the command"
    (neither,) = torch_says(cuda=None, source="amdsmi")
    assert neither.sentence == "2.9.0 is built without ROCm, so no job can use the 2 GPUs"
    (rocm,) = torch_says(cuda=None, hip="6.4.43482")
    assert rocm.sentence == "2.9.0 is built for ROCm, so no job can use the NVIDIA GPUs"
    assert rocm.remedy.startswith("install a build of torch for CUDA")


def test_a_failing_torch_import_is_an_error_with_its_message(sandbox, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudnn.so.9: cannot open shared object file')")
    (finding,) = check_torch(sandbox.box(PYTHONPATH=str(tmp_path)))
    assert finding.level == "error"
    assert "libcudnn.so.9" in finding.sentence


def test_a_hanging_torch_is_reported_after_a_timeout(sandbox, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setattr("sae_tui.doctor.torch_build.LIMIT_S", 1.0)
    (finding,) = check_torch(sandbox.box(PYTHONPATH=str(tmp_path)))
    assert "did not respond within 1 s" in finding.sentence


def test_the_real_torch_is_recognised(sandbox) -> None:
    (finding,) = check_torch(sandbox.box(PATH=os.environ["PATH"]))
    assert finding.level == "ok"
    assert finding.sentence.endswith("jobs run on the CPU here")
