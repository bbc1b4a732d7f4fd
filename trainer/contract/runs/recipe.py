"""An SAE's training settings with every "auto" resolved, for report cards and export metadata."""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.contract.json_file import convert_as
from trainer.contract.planning.rates import full_rate
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.settings.following import decay_fraction, following_rates
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.optimizers import LONG_RUN

# The key for the recipe in an exported SAE's metadata.
RECIPE = "training_recipe"
# The target counts as missed if L0 deviates from the requested value by more than this fraction.
MOST_L0_MISS = 0.05


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How an SAE was trained: `steps` of `planned_steps` steps, each on `batch_tokens` tokens over all ranks.

    `lr` is the peak learning rate, after the warm-up over `warmup_fraction` of the steps and before the decay over
    the last `decay_fraction`. If encoder updates are tied to decoder updates, `encoder_lr` is the encoders' separate
    learning rate. `freeze` names the weights that kept their initial values. `target_l0` is the requested L0, or None
    if the penalty is fixed. `passes` is the number of passes over the data, or None if its size is unknown.
    """

    optimizer: str
    optimizer_settings: dict[str, Any]
    lr: float
    encoder_follows: bool
    encoder_lr: float | None = None
    freeze: str = "off"
    warmup_fraction: float
    decay_fraction: float
    batch_tokens: int
    steps: int
    planned_steps: int
    tokens: int
    passes: float | None = None
    target_l0: int | None = None
    auxk_alpha: float | None = None
    k_aux: int | None = None
    seed: int


def recipe_of(
    layout: Layout,
    member: JobConfig,
    position: Position,
    d_in: int,
    *,
    is_transcoder: bool,
    n_rows: int | None,
    device: str,
) -> Recipe:
    """Return the recipe for `member`, one of a job's SAEs, at a position in the run.

    `n_rows` is the number of training rows. `device` is the type of the training device, "cuda" or "cpu".
    """
    one = msgspec.structs.replace(layout, job=member)
    train, settings, d_sae = member.train, member.sae.settings, member.sae.width(d_in)
    following = following_rates(member, is_transcoder=is_transcoder)
    lr = full_rate(one, d_sae, is_transcoder=is_transcoder)
    alpha = getattr(settings, "auxk_alpha", None)
    return Recipe(
        optimizer=train.optimizer,
        optimizer_settings=msgspec.structs.asdict(
            train.settings.for_run(one.total_steps if one.chooses_latents else LONG_RUN, device)
        ),
        lr=lr,
        encoder_follows=following is not None,
        encoder_lr=lr * following.encoder if following else None,
        freeze=member.sae.freeze,
        warmup_fraction=train.warmup_fraction,
        decay_fraction=decay_fraction(member, is_transcoder=is_transcoder),
        batch_tokens=layout.tokens_per_step,
        steps=position.step,
        planned_steps=layout.total_steps,
        tokens=position.tokens,
        passes=position.tokens / n_rows if n_rows else None,
        target_l0=settings.target_l0,
        auxk_alpha=alpha,
        k_aux=settings.n_aux(d_in) if alpha else None,
        seed=train.seed,
    )


def read_recipe(metadata: dict[str, Any]) -> Recipe | None:
    """Return the recipe in an SAE's metadata, or None if it is missing or cannot be read."""
    try:
        return convert_as(metadata[RECIPE], Recipe)
    except (KeyError, msgspec.ValidationError, RecursionError):
        return None


def recipe_lines(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the report card lines about the recipe, as pairs (title, text)."""
    own = ", ".join(f"{name} {_word(value)}" for name, value in recipe.optimizer_settings.items())
    follows = "encoder and decoder updates are not tied"
    if recipe.encoder_follows and recipe.encoder_lr is not None:
        follows = f"encoder and decoder updates are tied, encoders at a learning rate of {recipe.encoder_lr:.3g}"
    rise = f"rises over {recipe.warmup_fraction:.0%} of the steps" if recipe.warmup_fraction else "no warm-up"
    fall = f"decays over the last {recipe.decay_fraction:.0%}" if recipe.decay_fraction else "no decay"
    of_all = f" of {recipe.planned_steps:,}" if recipe.steps != recipe.planned_steps else ""
    lines = [
        ("recipe", f"{recipe.optimizer} ({own}), learning rate {recipe.lr:.3g}; {follows}"),
        ("schedule", f"{rise}, {fall}"),
        ("steps", f"{recipe.steps:,}{of_all}, {recipe.batch_tokens:,} tokens each, seed {recipe.seed}"),
    ]
    if recipe.freeze != "off":
        both = "encoder and decoder keep their initial values"
        lines.append(("frozen", both if recipe.freeze == "both" else f"the {recipe.freeze} keeps its initial values"))
    if recipe.auxk_alpha is not None:
        lines.append(
            ("AuxK", f"weight {recipe.auxk_alpha:.3g}, up to {recipe.k_aux} dead latents" if recipe.k_aux else "off")
        )
    return lines


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def l0_miss(l0: float, target: int | None) -> float:
    """Return the relative deviation of L0 from its target, negative if L0 is too low; 0 without a target."""
    return l0 / target - 1 if target else 0.0


def misses_l0(l0: float, target: int | None) -> bool:
    """Return whether L0 differs from its target by more than `MOST_L0_MISS`."""
    return abs(l0_miss(l0, target)) > MOST_L0_MISS


def asked_l0(l0: float, target: int | None) -> str:
    """Return the target L0 and, if it is missed, the deviation, such as `32 asked, +14%`; "" without a target."""
    if not target:
        return ""
    return f"{target} asked" + (f", {l0_miss(l0, target):+.0%}" if misses_l0(l0, target) else "")
