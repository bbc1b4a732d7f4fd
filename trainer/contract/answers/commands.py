"""JSON Schemas for the output of each `sae-train` command.

`run`, `resume`, `stop` and `extract` print their JSON result as the last line; all other commands print only the
result.
"""

from __future__ import annotations

import msgspec

from trainer.contract.answers.interaction import Answer
from trainer.contract.answers.schema import DRAFT, Schema, by_name, fields, list_of, or_null, typed, word
from trainer.contract.answers.shared import HOW_FAR, IMPORT_CHECK, REFUSAL, SEEDS, answer, card, metrics
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.plan import Plan
from trainer.contract.settings.shards import Shard

_OUTPUT = (str, "Absolute path of the output folder.")
_STATE = (word("finished", "stopped"), "Final state; a stopped run or extraction can be resumed.")
_BYTES = {name: (int, "Memory of this component, in bytes.") for name in Memory.__struct_fields__} | {
    "total": (int, "Total bytes.")
}
_MEMORY = fields("Memory in bytes", _BYTES)
_SPEED = {
    "seconds": (float, "Estimated duration, in s."),
    "tokens_per_s": (float, "Tokens per second."),
    "mode": (str, "Parallel mode."),
    "device": (str, 'Name of the GPU model, or "CPU".'),
    "is_measured": (bool, "Whether the speeds were measured on this machine."),
}
_NOTES = (list_of(str), "Notes on the result.")

_SAE_OF_A_SWEEP = fields(
    "SAE of a sweep",
    {
        "output_path": (str | None, "Absolute path of the SAE's folder; null if the SAE was dropped."),
        "dropped_at_step": (int | None, "Step at which train.halving dropped the SAE; null if it did not."),
        **metrics(),
    },
)
_RUN = fields(
    "Result of a run",
    {
        "run_dir": (str, "Absolute path of the run folder, which is the argument of `resume`."),
        "output_path": _OUTPUT,
        "steps": (int | None, "Number of completed steps; null if no steps were recorded."),
        "tokens": (int | None, "Number of training tokens; null if no steps were recorded."),
        "tokens_per_s": (float | None, "Tokens per second; null if not measured."),
        **metrics(),
        "outlier_fraction": (
            float | None,
            "Share of rows that were left out because of a huge norm (0 to 1); null if not measured.",
        ),
        "not_finite_fraction": (
            float | None,
            "Share of rows that were left out because they are not finite (0 to 1); null if not measured.",
        ),
        **HOW_FAR,
        "best_sae": (
            str | None,
            "Sweep: label of the SAE that the metrics describe; null if not measured, or if all SAEs differ only in the"
            " seed.",
        ),
        "seeds": (SEEDS, "Sweep over seeds: the SAEs whose means the metrics are."),
        "saes": (by_name(_SAE_OF_A_SWEEP), "Sweep: the result of each SAE, by its label."),
        "state": _STATE,
    },
    may_lack=["best_sae", "saes", "seeds"],
)
_FETCH = fields(
    "A downloaded run",
    {
        "run_dir": (str, "Absolute path of the new run folder."),
        "name": (str, "Name of the job."),
        "step": (int, "Step of the downloaded checkpoint."),
        "has_sae": (bool, "Whether the run has finished, so that its SAE was downloaded too."),
        "notes": (list_of(str), "What is damaged in the mirror and was left out."),
    },
)
_STOP = fields(
    "What was done",
    {
        "run_dir": (str, "Absolute path of the run folder."),
        "message": (str, "What happens next, in one sentence."),
    },
)
_INSPECTION = fields(
    "Stored activations",
    {
        "n_tokens": (int, "Number of rows."),
        "d_in": (int, "Width of a row."),
        "dtype": (str, "Type of the stored values."),
        "n_bytes": (int, "Total size of the files, in bytes."),
        "n_looked_at": (int, "Number of random rows that were checked."),
        "gamma": (
            float | None,
            "Norm of the mean row divided by the rows' root mean square distance from it; null if undefined.",
        ),
        "scale": (float | None, "Root mean square distance of the rows from their mean; null if undefined."),
        "median_norm": (float | None, "Median norm of a row; null if undefined."),
        "largest_norm": (float | None, "Largest norm of a row; null if undefined."),
        "outliers": (int, "Number of rows with a huge norm."),
        "not_finite": (int, "Number of rows that are not finite."),
        "zero_rows": (int, "Number of rows of zeros."),
        "constant_dimensions": (int, "Number of dimensions with the same value in every row."),
        "duplicates": (int, "Number of rows that occur more than once."),
        "heavy_dimensions": (list_of(int), "Dimensions that account for most of the variance."),
        "heavy_share": (float, "Share of the variance in the heavy dimensions (0 to 1)."),
        "subnormal": (float, "Share of values that are subnormal in fp16 (0 to 1)."),
        "hold_out": (str, 'Unit in which training holds out rows by default: "texts", "blocks" or "rows".'),
        "n_held_out": (int, "Number of rows that training holds out by default; 0: there are too few rows."),
        "n_texts": (int, "Number of texts held out; 0 if unknown."),
        "copies": (
            float | None,
            "Share of the held-out rows that are identical to a training row (0 to 1); null if not compared.",
        ),
        "findings": (
            list_of(
                fields(
                    "Finding",
                    {
                        "severity": (word("ok", "note", "warning", "error"), "Severity."),
                        "sentence": (str, "The finding."),
                        "remedy": (str, 'The remedy, or "" if unknown.'),
                    },
                )
            ),
            "Findings about training on this data; the exit code is 1 if any of them is an error.",
        ),
    },
)
_PUSHED = fields(
    "Uploaded to the hub",
    {
        "url": (str, "URL of the repository."),
        "private": (bool, "Whether the repository is private."),
        "files": (
            list_of(fields("File", {"path": (str, "Name of the file on the hub."), "bytes": (int, "Size in bytes.")})),
            "Files.",
        ),
        "command": (str, 'Shell command that opens the upload in its tool; "" if it has no such command.'),
    },
)
_EXPORT = fields(
    "One checkpoint",
    {
        "checkpoint": (str, "Absolute path of the exported checkpoint."),
        "step": (int, "Step of the checkpoint."),
        "output_path": _OUTPUT,
        "saes": (by_name(str), "Sweep: the folder of each SAE, by its label."),
        "left_out": (
            by_name(str),
            "Sweep: why the format cannot represent each SAE that was left out, by label.",
        ),
        "notes": (list_of(str), "What the format cannot represent; omitted if nothing is left out."),
        "pushed": (_PUSHED, "With --push."),
    },
    may_lack=["saes", "left_out", "notes", "pushed"],
)
_EXPORTED_SET = fields(
    "Several runs exported as a set",
    {
        "checkpoints": (list_of(str), "Absolute paths of the exported checkpoints."),
        "output_path": _OUTPUT,
        "layers": (by_name(int), "Step of each layer's checkpoint, by layer."),
        "left_out": (
            by_name(str),
            "Why the format cannot represent each SAE that was left out, by label.",
        ),
        "notes": _NOTES,
        "pushed": (_PUSHED, "With --push."),
    },
    may_lack=["left_out", "pushed"],
)
_IMPORT = fields(
    "Imported SAE",
    {
        "run_dir": (str, "Absolute path of the new run folder."),
        "form": (str, "Format of the imported files."),
        "architecture": (str, "Architecture of the SAE."),
        "notes": _NOTES,
        **IMPORT_CHECK,
    },
)
_CARDS = fields(
    "Report cards",
    {
        "cards": (
            list_of(
                card(
                    "Report card",
                    written_to=(
                        str | None,
                        "Folder of the report card; null if it was not written: the folder contains other weights.",
                    ),
                )
            ),
            "The report card of each SAE.",
        )
    },
)
_ESTIMATE = fields(
    "A training job",
    {
        "per_gpu": (_MEMORY, "Memory needed per GPU, or per process on CPUs."),
        **_SPEED,
        "hold_out": (str, 'Unit in which rows are held out: "texts", "blocks" or "rows".'),
        "model_gpus": (int, "Number of GPUs that only run the language model."),
        "per_model_gpu": (
            or_null(_MEMORY),
            "Memory needed per GPU that only runs the language model; null if there is no such GPU.",
        ),
    },
)
_ESTIMATE_OF_EXTRACTION = fields(
    "An extraction job",
    {
        "per_gpu": (by_name(int), "Memory of each component in bytes, by the component's name, and `total`."),
        "disk_bytes": (int, "Size of the files that the extraction will write, in bytes."),
        "disk_free_bytes": (int | None, "Free space on the output disk, in bytes; null if unknown."),
        **_SPEED,
        "seconds": (float | None, "Estimated duration, in s; null if unknown."),
    },
)
_PHASES = ("forward_encode", "forward_rest", "backward", "metrics", "exchange", "update")
_PLAN = typed(
    "How the ranks share the work",
    Plan,
    {
        "mode": "Parallel mode.",
        "ranks": "Number of processes.",
        "latent_ranks": "Number of ranks that share one set of latents.",
        "tokens_per_step": "Tokens per step.",
        "micro_batch": "Tokens per micro-batch on the rank with the most tokens.",
        "micro_batches": "Micro-batches per step.",
        "step_s": "Expected time of a step, in s.",
        "needs_bytes": "Memory needed by the most demanding rank, in bytes.",
        "token_shares": "Share of the tokens that each row of ranks processes.",
        "latent_shares": "Share of the latents that each column of ranks stores.",
        "reason": 'Why this mode was chosen; "": the job file sets it.',
        "model_share": "Share of a step in which the language model runs (0 to 1); 0: there is no model.",
        "text_parts": "Number of parts that the text is split into.",
        "model_gpus": "Number of GPUs that only run the language model.",
        "model_why": 'Why this number of `model_gpus` was chosen; "": no reason given.',
        "lr": "Peak learning rate of each SAE, by its label.",
        "precision": 'Precision of the matmuls; "": not chosen yet.',
    },
)
_BENCH = fields(
    "Step times of a job, measured on this machine",
    {
        "device": (str, "Name of the device."),
        "ranks": (int, "Number of processes."),
        "torch": (str, "Version of torch."),
        "precision": (str, "Precision of the matmuls."),
        "architecture": (str, "Architecture of the SAE."),
        "optimizer": (str, "Optimizer."),
        "d_in": (int, "Width of the activations."),
        "d_out": (int | None, "Width of the outputs; null if the same as `d_in`."),
        "d_sae": (int, "Number of latents."),
        "n_saes": (int, "Number of SAEs that are trained in one run."),
        "tokens_per_step": (int, "Tokens per step."),
        "steps": (int, "Number of steps that were timed."),
        "step_ms": (float, "Median time of a step, in ms."),
        "tokens_per_s": (float, "Tokens per second."),
        "phases_ms": (fields("Phases", {name: (float, "In ms.") for name in _PHASES}), "Mean time of each phase."),
        "floor": (
            fields(
                "Floor",
                {
                    "encoder_product_ms": (float, "Time of the encoder's dense matmul, in ms."),
                    "traffic_bytes": (float, "Number of bytes that a step reads and writes."),
                    "bandwidth_bytes_per_s": (float, "Measured memory bandwidth, in bytes per second."),
                    "traffic_ms": (float, "`traffic_bytes` divided by `bandwidth_bytes_per_s`, in ms."),
                    "floor_ms": (float, "The larger of `encoder_product_ms` and `traffic_ms`."),
                },
            ),
            "Lower bound of the step time on this machine.",
        ),
        "of_floor": (float, "Lower bound divided by the step time (0 to 1)."),
        "peak_memory_bytes": (int | None, "Peak of the reserved memory, in bytes; null if unknown."),
        "sent_bytes": (float | None, "Number of bytes that a rank sends per step; null if not counted."),
        "plan": (_PLAN, "The plan that the ranks chose."),
        "expected_step_ms": (float, "Step time predicted by the cost model, in ms."),
    },
)
_PROBE = fields(
    "Devices and the bus between them",
    {
        "device": (str, "Name of the device."),
        "ranks": (int, "Number of devices."),
        "precision": (str, "Precision of the matmuls."),
        "flops_per_s": (list_of(float), "Floating-point operations per second of each rank."),
        "memory_bytes_per_s": (list_of(float), "Memory bandwidth of each rank, in bytes per second."),
        "bus_bytes_per_s": (
            float | None,
            "Bandwidth of an all-reduce, in bytes per second; null if there is only one device.",
        ),
        "latency_s": (float | None, "Latency of a small all-reduce, in s; null if there is only one device."),
        "pairs": (by_name(float), "Bandwidth between each pair of devices, in bytes per second."),
    },
)
_SELF_TEST = fields(
    "Self-test",
    {
        "device": (str, "Name of the device."),
        "ok": (bool, "Whether all checks passed; if not, the exit code is 1."),
        "checks": (int, "Number of checks."),
        "failed": (
            list_of(
                fields(
                    "Check",
                    {
                        "part": (str, "Part of the self-test."),
                        "name": (str, "What is checked."),
                        "ok": (bool, "Whether the check passed."),
                        "found": (by_name({}), "Measured values."),
                    },
                )
            ),
            "Checks that failed.",
        ),
        "seconds": (float, "Duration of the checks, in s."),
    },
)
_EXTRACT = fields(
    "Extraction",
    {
        "state": _STATE,
        "outputs": (by_name(str), "Output folder of each hook, as a value for `data.path`."),
        "n_tokens": (int, "Number of rows per hook."),
        "left_out": (by_name(int), "Number of rows that were left out, by reason."),
        "tokens_per_s": (float | None, "Tokens that the model read per second; null if it read no tokens."),
    },
)
_PAIRS = fields("Pairs", {"file": (str, "The file written."), "n_pairs": (int, "Number of pairs.")})
_HEADERS = fields(
    "With --headers",
    {
        "shards": (
            list_of(
                typed(
                    "Shard",
                    Shard,
                    {
                        "offset": "Byte offset of the first row in the file; 0 if the rows must be decoded.",
                        "n_tokens": "Number of rows.",
                        "d_in": "Width of a row.",
                        "dtype": "Type of the stored values.",
                        "lists": "Byte offset of the list offsets, and bytes per offset; null if there are no lists.",
                        "column": "Parquet column to decode; null if the file is in another format.",
                        "mean": "Byte offset of the mean subtracted from int8 rows; null for other rows.",
                        "file": "Path of the file.",
                        "first_row": "Index of the first of these rows in the file.",
                    },
                    {"file": str},
                )
            ),
            "The rows of each file; Arrow files have several entries.",
        ),
        "notes": (list_of(str), "Notes on how the files are read, for example which files are skipped."),
    },
)
ANSWERS: dict[str, Schema] = {
    "error": REFUSAL,
    "run": answer("sae-train run --json, in the last line", _RUN),
    "resume": answer("sae-train resume --json, in the last line", _RUN),
    "fetch": answer("sae-train fetch --json", _FETCH),
    "stop": answer("sae-train stop --json, in the last line", _STOP),
    "extract": answer("sae-train extract --json, in the last line", _EXTRACT),
    "inspect": answer("sae-train inspect --json", _INSPECTION, _HEADERS),
    "pairs": answer("sae-train pairs --json", _PAIRS),
    "export": answer("sae-train export --json", _EXPORT, _EXPORTED_SET),
    "import": answer("sae-train import --json", _IMPORT),
    "eval": answer("sae-train eval --json", _CARDS),
    "interact": {"$schema": DRAFT, "title": "sae-train interact, one value per line"} | msgspec.json.schema(Answer),
    "estimate": answer("sae-train estimate --json", _ESTIMATE, _ESTIMATE_OF_EXTRACTION),
    "bench": answer("sae-train bench --json", _BENCH),
    "probe": answer("sae-train probe --json", _PROBE),
    "self-test": answer("sae-train self-test --json", _SELF_TEST),
}
