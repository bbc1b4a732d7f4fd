"""The recipe of a training, with nothing left at "auto": on an SAE's card and in the metadata of its exports."""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.contract.planning.rates import full_rate
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.settings.following import decay_fraction, following_rates
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.optimizers import LONG_RUN

# The name of a recipe among the metadata of an exported SAE.
RECIPE = "training_recipe"
# An L0 that is further from what was asked for than this share of it is reported.
MOST_L0_MISS = 0.05


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How an SAE was trained: `steps` of `planned_steps`, each on `batch_tokens` tokens of all ranks.

    `lr` is the full learning rate, as it is between the rise over `warmup_fraction` of the steps and the fall over
    `decay_fraction`. Where encoders follow their decoders, `encoder_lr` is their own rate. `target_l0` is the L0 that
    was asked for; None where a fixed penalty decides. `passes` is how often the data was read, None where its size is
    not known.
    """

    optimizer: str
    optimizer_settings: dict[str, Any]
    lr: float
    encoder_follows: bool
    encoder_lr: float | None = None
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
    layout: Layout, member: JobConfig, position: Position, d_in: int, *, is_transcoder: bool, n_rows: int | None
) -> Recipe:
    """Return the recipe of one SAE of a job, `member`, at a position; `n_rows` are the stored rows to train on."""
    one = msgspec.structs.replace(layout, job=member)
    train, knobs, d_sae = member.train, member.sae.knobs, member.sae.width(d_in)
    following = following_rates(member, is_transcoder=is_transcoder)
    lr = full_rate(one, d_sae, is_transcoder=is_transcoder)
    alpha = getattr(knobs, "auxk_alpha", None)
    return Recipe(
        optimizer=train.optimizer,
        optimizer_settings=msgspec.structs.asdict(
            train.knobs.for_run(one.total_steps if one.chooses_latents else LONG_RUN)
        ),
        lr=lr,
        encoder_follows=following is not None,
        encoder_lr=lr * following.encoder if following else None,
        warmup_fraction=train.warmup_fraction,
        decay_fraction=decay_fraction(member, is_transcoder=is_transcoder),
        batch_tokens=layout.tokens_per_step,
        steps=position.step,
        planned_steps=layout.total_steps,
        tokens=position.tokens,
        passes=position.tokens / n_rows if n_rows else None,
        target_l0=knobs.target_l0,
        auxk_alpha=alpha,
        k_aux=knobs.n_aux(d_in) if alpha else None,
        seed=train.seed,
    )


def read_recipe(metadata: dict[str, Any]) -> Recipe | None:
    """Return the recipe among an SAE's metadata; None where there is none that can be read."""
    try:
        return msgspec.convert(metadata[RECIPE], Recipe)
    except (KeyError, msgspec.ValidationError, RecursionError):
        return None


def recipe_lines(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the recipe in words, each line with its title."""
    own = ", ".join(f"{name} {_word(value)}" for name, value in recipe.optimizer_settings.items())
    follows = "encoders do not follow their decoders"
    if recipe.encoder_follows and recipe.encoder_lr is not None:
        follows = f"encoders follow their decoders, with a rate of their own of {recipe.encoder_lr:.3g}"
    rise = f"rises over {recipe.warmup_fraction:.0%} of the steps" if recipe.warmup_fraction else "no warm-up"
    fall = f"falls over the last {recipe.decay_fraction:.0%}" if recipe.decay_fraction else "no fall"
    of_all = f" of {recipe.planned_steps:,}" if recipe.steps != recipe.planned_steps else ""
    lines = [
        ("recipe", f"{recipe.optimizer} ({own}), learning rate {recipe.lr:.3g}; {follows}"),
        ("schedule", f"{rise}, {fall}"),
        ("steps", f"{recipe.steps:,}{of_all} of {recipe.batch_tokens:,} tokens, seed {recipe.seed}"),
    ]
    if recipe.auxk_alpha is not None:
        lines.append(
            ("AuxK", f"weight {recipe.auxk_alpha:.3g}, {recipe.k_aux} dead latents" if recipe.k_aux else "off")
        )
    return lines


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def l0_miss(l0: float, target: int | None) -> float:
    """Return by which share an L0 is above what was asked for, below 0 where it is below; 0 where nothing was."""
    return l0 / target - 1 if target else 0.0


def asked_l0(l0: float, target: int | None) -> str:
    """Say what L0 was asked for, and how far from it this one is where that is more than `MOST_L0_MISS`."""
    if not target:
        return ""
    miss = l0_miss(l0, target)
    return f"{target} asked" + (f", {miss:+.0%}" if abs(miss) > MOST_L0_MISS else "")
