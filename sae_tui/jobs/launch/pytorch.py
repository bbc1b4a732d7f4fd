"""What can be told of the PyTorch that ranks will import, from its files: importing it takes seconds and 200 MB."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

OTHER_BUILD = "install another build of torch; pytorch.org/get-started has the command"


def cuda_problem() -> str:
    """Return why no job can use a GPU with this build; "" where one can, or where its files do not say."""
    try:
        spec = importlib.util.find_spec("torch")
        file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
        return _problem_of_build(file, file.stat().st_mtime_ns) if file else ""
    except (OSError, ValueError, ImportError):
        return ""


def without_cuda(version: str, gpus: str) -> str:
    """Return `2.9.0+cpu is built without CUDA, so that no job can use the 2 GPUs`."""
    return f"{version} is built without CUDA, so that no job can use the {gpus}"


@functools.lru_cache(maxsize=1)
def _problem_of_build(file: Path, _mtime_ns: int) -> str:
    """Return the problem by the `version.py` that is made with every build; ROCm answers in the place of CUDA."""
    text = file.read_text(encoding="utf-8")
    built_for = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE))
    version = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    if version is None or built_for.get("cuda") != "None" or built_for.get("hip", "None") != "None":
        return ""
    return f'PyTorch {without_cuda(version[1], "GPUs")}; {OTHER_BUILD}, or choose "cpu"'
