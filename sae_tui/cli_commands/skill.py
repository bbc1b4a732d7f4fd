"""`sae-tui skill`: prints a guide showing agents how to train an SAE with JSON-printing commands."""

from __future__ import annotations

import argparse

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json
from trainer.contract.exits import Exit

_EXITS = "\n".join(f"- `{one:d}` {one.meaning}" for one in Exit)
GUIDE = f"""\
---
name: sae-tui
description: Train and evaluate sparse autoencoders on GPUs with commands that print JSON.
---

# Training a sparse autoencoder with `sae-tui`

With `--json` a command prints one JSON value on standard output and nothing else; warnings go to standard error.
`sae-tui schema COMMAND` prints the JSON Schema of its output, with the unit of each field and when it is null.
`sae-tui COMMAND --help` shows its flags and examples. Training needs `pip install 'sae-tui[train]'`.

A command that fails prints `{{"error": {{"field": ..., "message": ..., "fix": ...}}}}`; do what `fix` says, or change
what `field` names. Exit codes:

{_EXITS}

## 1. Check the machine

`ok` is false if a finding is an error; each finding has a `remedy`. A GPU with `reason` "" is free. Without GPUs
jobs train on the CPU. (`--demo` after `sae-tui` simulates GPUs; training on the CPU does not need it.)

```sh
sae-tui doctor --json
sae-tui gpus --json
```

## 2. A job file

Omitted settings have sensible defaults. `path = "sample"` is data that comes with the app; your own data is a folder
of activations, which `sae-train extract` computes with a language model from your text.

```sh
cat > job.toml <<'END'
name = "first"
[data]
path = "sample"
[sae]
d_sae = 384
k = 16
[train]
batch_size = 256
n_steps = 20
END
```

## 3. Choose, check, launch

`recommend` returns indices for `--gpus`. If it returns none and exits with 1, no GPU is suitable; use `--gpus cpu`.
`validate` lists everything that would keep the job from running. `launch` returns immediately with the `id`,
here 1 and 2. The jobs run in the background.

```sh
sae-tui recommend job.toml --json || test $? = 1
sae-tui validate job.toml --gpus cpu --json
sae-tui launch job.toml --gpus cpu --json
sae-tui launch job.toml --gpus cpu --set sae.k=32 --after 1 --json
```

## 4. Watch

`jobs --watch` prints a line after every change until the reader closes the pipe. `job ID --wait` returns when the job
has ended, and its exit code says how the job ended. `events`, `cause` and `sae-tui logs ID --json` say why a job
failed. `sae-tui resume ID` continues from the job's last checkpoint.

```sh
sae-tui jobs --watch --json | head -n 1
sae-tui job 1 --wait --json
sae-tui job 2 --wait --json
```

## 5. Evaluate, compare, export

`heldout_fvu` (lower is better) and `heldout_l0` in the output of `job` are measured on held-out rows; `fvu` is measured
on the last training batches and is too optimistic. `card` has `figures` with standard errors: `fvu`, `l0`, `dead`. An
export is a folder that SAELens loads, as is a job's `output_path`; `--format` selects other formats.

```sh
sae-tui compare 1 2 --json
sae-tui export 1 --out first-sae --json
```

## 6. Look at the latents

`eval` finds the texts on which each latent fires, if the data has token ids. Each latent has `contexts`, `density`,
`family` and, if they were written, `name`, `note` and `explanation`.

```sh
sae-tui eval 1 --wait --json
sae-tui features 1 --limit 3 --json
sae-tui annotate 1 5 --star --name "to check" --json
sae-tui features 1 --search starred: --json
```

If the data comes from a language model, these commands load it (about 10 s for a small model on a CPU):
`sae-tui features ID --text TEXT --json` returns the latents that fire on each token, and `sae-tui steer ID LATENT
--strength 2 --prompt TEXT --json` continues a prompt with and without a latent; `--ablate` sets it to 0. `sae-tui eval
ID --model auto --effects --wait` measures each latent's effect on the loss; then `features ID --sort effect` works.
`sae-tui explain ID --url URL --model NAME --json` describes latents with a model on an OpenAI-compatible server, and
scores the descriptions. From Python, `sae_tui.load(ID)` gives the same.
"""


def show_skill(context: CommandContext, _flags: argparse.Namespace) -> int:
    """Print the guide."""
    if context.as_json:
        show_json({"guide": GUIDE})
    else:
        for line in GUIDE.splitlines():
            say(line)
    return Exit.DONE
