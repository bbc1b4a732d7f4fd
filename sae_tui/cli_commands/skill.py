"""`sae-tui skill`: prints a guide for agents that train an SAE with commands that answer in JSON."""

from __future__ import annotations

import argparse

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json
from trainer.contract.exits import Exit

_EXITS = "\n".join(f"- `{one:d}` {one.meaning}" for one in Exit)
GUIDE = f"""\
---
name: sae-tui
description: Train sparse autoencoders on GPUs and judge them, by commands that answer in JSON.
---

# Training a sparse autoencoder by `sae-tui`

With `--json` a command prints one JSON value on standard output and nothing else; warnings go to standard error.
`sae-tui schema COMMAND` is the JSON Schema of its answer, with the unit of each field and when it is null.
`sae-tui COMMAND --help` has its flags and examples. Training needs `pip install 'sae-tui[train]'`.

A command that fails prints `{{"error": {{"field": ..., "message": ..., "fix": ...}}}}`; do what `fix` says, else change
what `field` names. Exit codes:

{_EXITS}

## 1. What is here

`ok` is false where something is in the way; each finding has a `remedy`. A GPU with `reason` "" is free. Without GPUs
jobs train on the CPU; `--demo` after `sae-tui` simulates GPUs, and is not needed for that.

```sh
sae-tui doctor --json
sae-tui gpus --json
```

## 2. A job file

Settings that are left out have good defaults. `path = "sample"` is data that is shipped with the app; your own is a
folder of activations, as `sae-train extract` makes it of a language model and a text.

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

`recommend` answers with indices for `--gpus`; none and exit code 1 mean that no GPU suits: then `--gpus cpu`.
`validate` says all that would keep the job from running. `launch` returns at once with the `id`, here 1 and 2; the
jobs run on when you do not.

```sh
sae-tui recommend job.toml --json || test $? = 1
sae-tui validate job.toml --gpus cpu --json
sae-tui launch job.toml --gpus cpu --json
sae-tui launch job.toml --gpus cpu --set sae.k=32 --after 1 --json
```

## 4. Watch

`jobs --watch` prints a line at every change until nobody reads. `job ID --wait` returns once the job has ended, and its
exit code tells how. `events`, `cause` and `sae-tui logs ID --json` say why one failed; `sae-tui resume ID` goes on from
its last checkpoint.

```sh
sae-tui jobs --watch --json | head -n 1
sae-tui job 1 --wait --json
sae-tui job 2 --wait --json
```

## 5. Judge, compare, export

`heldout_fvu` (lower is better) and `heldout_l0` in the answer of `job` are of rows that no step has seen; `fvu` is of
the last batches, and flatters. `card` has `figures` with errors: `fvu`, `l0`, `dead`. An export is a folder that
SAELens loads; `--format` names others. `output_path` of a job is such a folder already.

```sh
sae-tui compare 1 2 --json
sae-tui export 1 --out first-sae --json
```
"""


def show_skill(context: CommandContext, _flags: argparse.Namespace) -> int:
    """Print the guide."""
    if context.as_json:
        show_json({"guide": GUIDE})
    else:
        for line in GUIDE.splitlines():
            say(line)
    return Exit.DONE
