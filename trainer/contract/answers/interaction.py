"""Requests to `sae-train interact` and its answers, both as JSON Lines."""

from __future__ import annotations

from typing import Annotated

import msgspec

# The maximum number of tokens to generate, and the highest temperature.
MOST_GENERATED, MOST_TEMPERATURE = 4096, 100
# The maximum length of a request's line in bytes.
MOST_REQUEST_BYTES = 2**22


class ReadText(msgspec.Struct, frozen=True, tag="read", tag_field="request"):
    """Asks which latents fire on a text.

    With `is_chat`, the text is a user's message in the model's chat template, up to the beginning of the model's own
    message. The answer has the 256 strongest latents of each token, and all of `latents` that fire.
    """

    text: str
    is_chat: bool = False
    latents: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=64)] = ()


class Steered(msgspec.Struct, frozen=True):
    """Sets a latent to `strength` times its largest activation; 0 ablates the latent."""

    latent: Annotated[int, msgspec.Meta(ge=0)]
    strength: float = 0.0


class Generate(msgspec.Struct, frozen=True, tag="generate", tag_field="request"):
    """Asks for the model's continuation of a prompt, unchanged and with steered latents.

    With `adds`, the strength is added to the latent's own activation instead of replacing it. With `only_generated`,
    the prompt is read unchanged. `temperature` 0 chooses the most likely token; otherwise, both continuations are
    sampled with the same random numbers from `seed`. `part` is the part of a crosscoder whose rows are changed, in this
    part's model; None stands for all parts of the first model.
    """

    prompt: str
    latents: Annotated[tuple[Steered, ...], msgspec.Meta(min_length=1, max_length=64)]
    is_chat: bool = False
    adds: bool = False
    only_generated: bool = False
    n_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_GENERATED)] = 30
    temperature: Annotated[float, msgspec.Meta(ge=0, le=MOST_TEMPERATURE)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    part: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="request"):
    """Ends the current generation early; it has no answer of its own."""


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="event"):
    """The first answer: the language model is loaded. `generates` is false if it does not predict next tokens.

    `has_scale` is false if the features file, written by an earlier version, does not record the scale of its
    activations. Shares of the largest activation and strengths may then be wrong by a constant factor. A crosscoder
    names all its models and hooks; `generates` is about its first model.
    """

    model: str
    hook: str
    n_latents: int
    device: str
    generates: bool = True
    reads_chats: bool = False
    has_scale: bool = True


class FiringLatent(msgspec.Struct, frozen=True):
    """A latent and its activation, in the units of the features file."""

    latent: int
    act: float


class TextToken(msgspec.Struct, frozen=True):
    """A token of a text with the latents that fire on it, strongest first.

    Tokens that share a character are merged, with the largest activation of each latent. `is_counted` is false for
    tokens that training usually leaves out: the first token and special tokens.
    """

    text: str
    latents: tuple[FiringLatent, ...]
    is_counted: bool = True


class TextRead(msgspec.Struct, frozen=True, tag="text", tag_field="event"):
    """The answer to `ReadText`."""

    tokens: tuple[TextToken, ...]


class Continued(msgspec.Struct, frozen=True, tag="continued", tag_field="event"):
    """Both continuations so far, while they are generated."""

    plain: str
    steered: str
    n_tokens: int


class MovedToken(msgspec.Struct, frozen=True):
    """A possible next token after the prompt: the change of its logit, and its probabilities."""

    text: str
    logit: float
    plain: float
    steered: float


class TokenKl(msgspec.Struct, frozen=True):
    """A token, and the KL divergence of the predictions after it, in nats: of steered from unchanged.

    Tokens that share a character are merged, with the largest divergence.
    """

    text: str
    kl: float


class Generated(msgspec.Struct, frozen=True, tag="generated", tag_field="event"):
    """The answer to `Generate`: both continuations, and the effect on predictions.

    `moved` contains the tokens with a probability of at least 0.1 % in either case whose logits change most. `kl` is
    measured on the prompt and the unchanged continuation.
    """

    plain: str
    steered: str
    n_tokens: int
    moved: tuple[MovedToken, ...]
    kl: tuple[TokenKl, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused", tag_field="event"):
    """The answer to a request that cannot be fulfilled, with one sentence."""

    message: str


Request = ReadText | Generate | Stop
Answer = Ready | TextRead | Continued | Generated | Refused
