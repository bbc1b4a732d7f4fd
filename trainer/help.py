"""The examples and exit codes shown by `--help`."""

from __future__ import annotations

from trainer.contract.exits import Exit, in_short
from trainer.contract.settings.catalog import FORMATS, READ_FORMATS, WRITTEN_FORMATS
from trainer.contract.settings.schedule import COOL_DOWN_SHARE
from trainer.contract.wording import join_words

_WIDTH = max(map(len, WRITTEN_FORMATS))
_FORMATS = "\n".join(
    f"{name:{_WIDTH}}  {one.summary}\n{'':{_WIDTH}}  {one.use}" for name, one in FORMATS.items() if one.is_written
)
_READ = join_words([*READ_FORMATS])
_EXITS_OF_EVAL = in_short(Exit.DONE, Exit.FAILED, Exit.USAGE)
_EXITS = in_short(Exit.DONE, Exit.FAILED, Exit.USAGE, Exit.STOPPED)

OVERVIEW = f"""\
examples:
  sae-train extract job.toml                        store a language model's activations at some hooks
  sae-train run job.toml                            train what the job file describes
  sae-train run job.toml --set 'sae.k=[16,32,64]'   three SAEs from one pass over the data
  sae-train resume runs/sae-20250101-120000         resume after Ctrl-C, a crash or a reboot
  sae-train stop runs/sae-20250101-120000 --finish  cool down and finish early
  sae-train eval runs/sae-20250101-120000           its report card
  sae-train export runs/sae-20250101-120000 --out my-sae --best
  sae-train estimate job.toml                       memory per GPU, before a run
  sae-train bench job.toml                          tokens/s here, and where the time goes

a minimal job file for a training run:
  [data]
  path = "data/sample"       # .safetensors shards with a tensor `activations` [n_tokens, d_in]

Ctrl-C saves a checkpoint and stops; a second Ctrl-C ends the run immediately. `COMMAND --help` has details.
{_EXITS}
"""

RUN = f"""\
examples:
  sae-train run job.toml --set launch.gpus=auto:2               on two GPUs
  sae-train run job.toml --set launch.gpus=cpu:2                on two CPU processes
  sae-train run job.toml --set train.n_steps=50 --out /tmp/try --json

a sweep trains several SAEs in one pass over the data; give a list of values, or two lists for all combinations:
  sae-train run job.toml --set 'sae.k=[16,32,64]'
  sae-train run job.toml --set 'sae.d_sae=[3072,12288]' --set 'train.seed=[0,1]'

the run folder contains job.toml (complete, to repeat the run), checkpoints/ (the newest and the best), metrics.db,
logs/, attempt1/environment.json (versions, commit, hardware, command) and, at the end, sae/, which SAELens loads.

on Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU or a lost terminal, the run saves a checkpoint and stops; a second Ctrl-C
ends it immediately.
{_EXITS}
"""

EXTRACT = f"""\
examples:
  sae-train extract job.toml                                      start an extraction, or resume a stopped one
  sae-train extract job.toml --set extract.n_tokens=10M --json

a job file:
  kind = "extract"
  [model]
  path = "HuggingFaceTB/SmolLM2-135M"            # a folder, a name on the hub, or a .gguf file
  hooks = ["resid_post.12", "mlp_out.12"]        # also blocks.12.hook_resid_post, or a module like "layers.12.mlp"
  [text]
  path = "corpus.txt"                            # .txt, .jsonl or .parquet, or a folder; or dataset = "NAME"
  context = 256
  [extract]
  n_tokens = 1_000_000
  output = "activations"                         # one subfolder per hook, for `data.path` of a training job

documents are packed end to end, and do not attend to each other. Rows of special tokens, rows of the first token of
each document in a context, and rows with more than 10 times the median norm are left out; the number of such rows is
reported. All hooks have rows for the same tokens. Ctrl-C stops the extraction; the same command resumes it after the
last finished shard. Extraction requires `pip install 'sae-tui[hf]'`.
{_EXITS}
"""

INSPECT = """\
examples:
  sae-train inspect data/sample
  sae-train inspect acts/resid_post.12 --json

it checks 65,536 random rows for NaN, huge norms, constant dimensions and duplicate rows, and measures how far the mean
is from the origin (gamma, relative to the spread of the rows). Each finding comes with a remedy. --headers does not
check the rows; it only shows the number of rows and how they are stored.
Exit codes: 0 checked, 1 not usable for training, 2 bad usage or data that cannot be read.
"""

PAIRS = """\
examples:
  sae-train pairs acts/resid_post.12 pairs.parquet
  sae-train pairs acts/resid_post.12 pairs.parquet --rows 20000 --before 128

each row of the file has an activation_vector, the text up to its token, the token, and the text after it. Tokens whose
rows the extraction left out are missing from the texts.
Exit codes: 0 written, 1 rows without tokens, or not enough disk space, 2 bad usage.
"""

RESUME = f"""\
examples:
  sae-train resume runs/sae-20250101-120000
  sae-train resume runs/sae-20250101-120000 --set train.n_steps=20000     longer than planned
  sae-train resume runs/sae-20250101-120000 --set 'launch.gpus=[2,3]'     on other GPUs
  sae-train resume runs/sae-20250101-120000 --finish                      cool down from the checkpoint, and finish
  sae-train resume hf://ada/saes/run1 --out runs/run1                     a run of another machine, from its mirror

it resumes from the newest complete checkpoint; on the CPU the result is bit-identical to that of an uninterrupted run.
The config of a run is frozen, except that --set can change its length (train.n_steps, train.n_tokens), its intervals
(train.log_every, train.eval_every, train.checkpoint_every*, train.keep_checkpoints), train.mirror*, launch.* and, if
the shards there are the same, data.path. A different length changes the learning rate, since the schedule spans the
run. If the number of devices changes, the number of tokens per step stays the same. A finished run is not changed (exit
code 0), unless it is made longer.
--finish ends a run early, like `stop --finish`: most of an SAE's quality is gained while the learning rate falls.
{_EXITS}
"""

FETCH = f"""\
examples:
  sae-train fetch hf://ada/saes/run1 --out runs/run1
  sae-train resume runs/run1 --set data.path=/data/here

it downloads the latest intact checkpoint that train.mirror_checkpoints has uploaded, the curves and, if the run has
finished, the SAE; every checksum is verified. `sae-train resume URL` does the same, and then trains.
{_EXITS}
"""

STOP = f"""\
examples:
  sae-train stop runs/sae-20250101-120000              save a checkpoint and stop, as Ctrl-C does
  sae-train stop runs/sae-20250101-120000 --finish     cool down first, for a shorter but finished run

--finish: the learning rate falls to 0 over a further {COOL_DOWN_SHARE:.0%} of the completed steps. All other schedules
that depend on the run's length end at the same time, and the run finishes, with its SAE and report card. Most of an
SAE's quality is gained while the rate falls: a run that is stopped halfway is worse than a finished run of half the
length. Another `stop` ends the cool-down immediately; `resume` continues the cool-down, and
`resume --set train.n_steps=N` trains to N steps instead. If the disk is full, a stopped run waits for free space;
another `stop` ends this wait.
{_EXITS}
"""

EXPORT = f"""\
examples:
  sae-train export runs/sae-20250101-120000 --out my-sae                  the newest checkpoint, for SAELens
  sae-train export runs/sae-20250101-120000 --out my-sae --best           the lowest held-out FVU
  sae-train export RUN/checkpoints/step-00000500 --out my-sae --format sparsify
  sae-train export runs/sae-20250101-120000 --out my-sae --only k=32      one SAE of a sweep, by its label
  sae-train export runs/layer* --out set --format circuit-tracer          a transcoder of each layer, as a set
  sae-train export runs/sae-20250101-120000 --out my-sae --push my-sae    also upload it to a private repository

{_FORMATS}

a format that would change the output of an SAE is refused; anything else that is left out is reported. Each SAE
of a sweep gets its own folder: the SAEs that fit the format are written, and the others are listed with the reason.
the exported SAE accepts and returns raw activations, since scales are folded into the weights.
--push uploads the files that this export wrote, and a model card if neither DIR nor the hub has a README.md. The
command lists the files and the repository, and asks for confirmation before it uploads them. The metadata of the files
contains the model, hook and text of your job. --push requires `pip install 'sae-tui[hf]'` and a login with
`hf auth login`. Without --push, no host is contacted.
{_EXITS}
"""

IMPORT = f"""\
examples:
  sae-train import their-sae --out runs/theirs --data activations/resid_post.12
  sae-train import EleutherAI/sae-llama-3-8b-32x/layers.10 --out runs/l10 --data activations/resid_post.10
  sae-train import trainer_0/checkpoints/ae_1000.pt --out runs/early --data activations/resid_post.12
  sae-train import ae --out runs/ae --data acts --config trainer.dict_class=AutoEncoderTopK
  sae-train import crosscoder --out runs/c --data resid_post.8 --data resid_post.12
  sae-train import layers.3.mlp --out runs/t --data mlp_in.3 --transcoder --set data.target_path=mlp_out.3
  sae-train eval runs/theirs                                  its report card on that data
  sae-train resume runs/theirs                                train it further: --set train.n_tokens=20M
  sae-train export runs/theirs --out copy --format sparsify   in another format

formats, recognised by their files: {_READ}.
an SAE that cannot be computed by any supported architecture is refused with the reason. FOLDER may be a folder, a file,
or OWNER/NAME/FOLDER on the Hugging Face hub, whose cache is searched first. Only tensors are read from a .pt file and
only arrays from an .npz file; a file with anything else is refused. Links are followed only inside the hub's cache.
the SAE's model, hook, text and context are kept for later exports. The SAE is checked on 1,000 rows of DATA, and a
warning is printed if its L0 or FVU is implausible. The weights keep the scale of DATA. The optimizer state starts at
zero.
{_EXITS}
"""

EVAL = f"""\
examples:
  sae-train eval runs/sae-20250101-120000            its newest checkpoint
  sae-train eval runs/sae-20250101-120000 --best --json
  sae-train eval runs/sae-20250101-120000 --model auto          also in the language model of its data
  sae-train eval my-sae --data data/sample                      an SAE of any tool, on any activations
  sae-train eval my-transcoder --data rows/mlp_in.6 --targets rows/mlp_out.6

The report card contains FVU with its standard error, explained variance, MSE, cosine, the distribution of L0,
shrinkage, the shares of dead, rare (on 100,000 rows or more) and dense latents, the histogram of densities and the
nearest decoder directions. These metrics are defined as in SAELens and SAEBench, and measured on the held-out rows of
the run. The report card also contains 20 random latents with their texts.
With --model, the report card also contains the losses of the model with the SAE's reconstructions in place of its
activations: cross-entropy, KL divergence, and the loss recovered relative to zeroed rows, on text after the extracted
part. The losses and the explained variance on that text are measured twice. The first measurement excludes rows that
were not extracted, such as rows of first tokens and special tokens, and does not replace them. The second measurement
includes all tokens, as in SAELens (`all_tokens` in JSON), for comparison with figures from SAELens. First tokens often
have huge norms, and SAEs are not trained on them: one SAE had a CE score of 0.97 without first tokens and 0.63 with
first tokens.
With --effects, the report card also contains the effect of each latent: how much the model's loss increases, in nats
per token, if the latent's contribution (activation times decoder direction) is subtracted from the rows. A latent with
a positive effect helps the model. A latent of a cross-layer transcoder contributes to the outputs of this MLP and of
all later ones. One forward and two backward passes over the text estimate the effects of all latents, including the
curvature of the loss; the 20 latents with the largest estimates are also ablated, on a part of the text, and the report
card shows how well both agree. Estimates are often too small for the largest effects, so use them to rank latents.
With --probe, the report card also contains the AUC of logistic regressions on the 1 and 16 latents whose means differ
most between two classes of texts, and on all activations, over 3 splits of the texts of sae-probes (`pip install
'sae-tui[eval]'`; `--no-deps sae-probes`, scikit-learn and zstandard are enough). ± is the standard error over splits
only, since the sets are the same for every SAE. For an encoder model, which does not predict next tokens, --probe works
but there are no losses.
An evaluation adds to the report card and replaces only what it measures again; the previous report card is kept in
`.cards`. The report card is written next to the weights as card.json and as a model card, README.md, if the weights are
from this checkpoint. The max-activating examples are also written, if the data contains the tokens of its rows or a
language model streams the rows. With --model, the tokens that each latent promotes and suppresses are written too:
W_dec @ W_U, with the weight of the final norm folded into W_U. `sae-tui features` shows examples and tokens.
{_EXITS_OF_EVAL}
"""

INTERACT = f"""\
example:
  sae-train interact saes/7 < requests.jsonl

Requests are lines of JSON on standard input; each is answered with one or several lines. The app and `sae-tui features
--text` and `sae-tui steer` use this command. The first line of output is {{"event": "ready"}}.
  {{"request": "read", "text": "The king spoke"}}
      {{"event": "text"}}: the tokens with the latents that fire on them, strongest first
  {{"request": "generate", "prompt": "The king", "latents": [{{"latent": 7, "strength": 2}}], "n_tokens": 30}}
      {{"event": "continued"}} after each token, then {{"event": "generated"}}: the continuation with and without
      steering, the logits that moved most, and the KL divergence after each token
A strength is a multiple of the latent's largest activation in the evaluation; 0 ablates the latent. `adds`,
`only_generated`, `is_chat`, `temperature` and `seed` are optional. {{"request": "stop"}} ends a generation early. A
request that cannot be fulfilled is answered with {{"event": "refused"}} and the reason.
{_EXITS}
"""

ESTIMATE = """\
examples:
  sae-train estimate job.toml
  sae-train estimate job.toml --set sae.expansion_factor=32 --set launch.gpus=auto:2 --json
"""

BENCH = f"""\
examples:
  sae-train bench                                                          d_in 768, default settings
  sae-train bench job.toml --set train.batch_size=16384 --set train.precision=bf16
  sae-train bench --set launch.gpus=cpu --set sae.d_sae=3072 --steps 50 --json

it runs steps on random data of the job's shape, so that reading data is not included. The floor is the time of the
encoder's single dense matmul on this machine, or of the step's memory traffic at the measured bandwidth,
whichever is longer: no step that computes every pre-activation can be faster.
{_EXITS}
"""

PROBE = """\
This takes a second or two after the ranks have started. Every run with several ranks makes the same measurements when
it starts, and `auto` chooses a parallel mode from them.

examples:
  sae-train probe
  sae-train probe --gpus 0,1 --json
  sae-train probe --gpus cpu:2
"""

JOIN = f"""\
Every host needs the project, the data at the same path, and the run folder on a shared file system. If the command is
run again on every host, it resumes from the newest checkpoint. Leave torchrun's --max-restarts at 0, since with the
static rendezvous a restart on one host does not restart the others. SIGTERM, SIGUSR1, SIGUSR2 and SIGXCPU save a
checkpoint and stop the run.

example, with --node-rank 0 on host0 and 1 on the other:
  torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --rdzv-backend static \\
      --master-addr host0 --master-port 29500 -m trainer join job.toml --out /shared/runs/one

torchrun listens on the port on every address of host0 without authentication, so a firewall must block other users. Do
not use --rdzv-backend c10d or --standalone, since with them anyone who can reach the port can run code as you. On one
host, `run` needs no such port; on a cluster, neither does sae-tui with launch.backend = "slurm".
{_EXITS}
"""

SELF_TEST = """\
The checks do not read or write your data. They compare sparse matmuls and selections with float64, and the FVU of
every architecture in every precision with its FVU on the CPU. They also check whether the host waits for the GPU in a
step, whether batches are copied correctly during a step, and whether an interrupted run resumes bit-identically. --full
also compares the reserved memory with the estimate. No other process should use the GPU during the checks.
Exit codes: 0 all checks passed, 1 a check failed, 2 bad usage.
"""
