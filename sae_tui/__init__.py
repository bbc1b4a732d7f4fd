"""Terminal app for monitoring GPUs and launching SAE training jobs. Importing this package loads no other module.

`sae_tui.run` and `sae_tui.job` launch and follow jobs from Python, and `sae_tui.load` loads an SAE; see `sae_tui.api`.
"""

# Type checkers recognise this name, so `typing` need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from sae_tui.api import Job, Latents, Result, UserError, job, load, run

__all__ = ["Job", "Latents", "Result", "UserError", "job", "load", "run"]


def __getattr__(name: str) -> object:
    """Load `sae_tui.api` when one of its names is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if fault := import_module("sae_tui.own_trainer").fault_of_trainer():
        raise ImportError(fault)
    return getattr(import_module("sae_tui.api"), name)
