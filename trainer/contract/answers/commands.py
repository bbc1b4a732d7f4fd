"""JSON Schemas for the output of each `sae-train` command.

`run`, `resume`, `stop` and `extract` print their JSON result as the last line; all other commands print only the
result.
"""

from __future__ import annotations

from trainer.contract.answers.schema import Schema, by_name, fields, list_of, or_null, typed, word
from trainer.contract.answers.shared import HOW_FAR, IMPORT_CHECK, REFUSAL, answer, card, metrics
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.plan import Plan
from trainer.contract.settings.shards import Shard

_OUTPUT = (str, "Folder that was written, an absolute path.")
_STATE = (word("finished", "stopped"), "How it ended; a stopped extraction can be continued.")
_BYTES = {name: (int, "Bytes of this part.") for name in Memory.__struct_fields__} | {"total": (int, "Total bytes.")}
_MEMORY = fields("Memory in bytes", _BYTES)
_SPEED = {
    "seconds": (float, "Estimated duration, in s."),
    "tokens_per_s": (float, "Tokens per second."),
    "mode": (str, "Parallel mode."),
    "device": (str, 'Kind of GPU, or "CPU".'),
    "is_measured": (bool, "Whether the speeds were measured on this machine."),
}
_NOTES = (list_of(str), "Notes on the result.")

_SAE_OF_A_SWEEP = fields("SAE of a sweep", {"output_path": _OUTPUT} | metrics())
_RUN = fields(
    "Result of a run",
    {
        "run_dir": (str, "Run folder, which `resume` takes; an absolute path."),
        "output_path": _OUTPUT,
        "steps": (int | None, "Steps done; null: no step was recorded."),
        "tokens": (int | None, "Tokens trained on; null: no step was recorded."),
        "tokens_per_s": (float | None, "Tokens per second; null: not measured."),
        **metrics(),
        "outlier_fraction": (float | None, "Share of rows left out for a huge norm (0 to 1); null: not measured."),
        "not_finite_fraction": (float | None, "Share of rows left out as not finite; null: not measured."),
        **HOW_FAR,
        "best_sae": (str | None, "Sweep: label of the SAE that the metrics describe; null: not measured."),
        "saes": (by_name(_SAE_OF_A_SWEEP), "Sweep: each SAE by its label."),
        "state": _STATE,
    },
    may_lack=["best_sae", "saes"],
)
_STOP = fields(
    "What was done",
    {
        "run_dir": (str, "Run folder, an absolute path."),
        "message": (str, "What happens next, in one sentence."),
    },
)
_INSPECTION = fields(
    "Stored activations",
    {
        "n_tokens": (int, "Number of rows."),
        "d_in": (int, "Width of a row."),
        "dtype": (str, "Type of the stored values."),
        "n_bytes": (int, "Bytes of the files."),
        "n_looked_at": (int, "Number of random rows that were checked."),
        "gamma": (float | None, "Distance of the mean from the origin in spreads of the rows; null: not defined."),
        "scale": (float | None, "Root mean square distance from the mean; null: not defined."),
        "median_norm": (float | None, "Median norm of a row; null: not defined."),
        "largest_norm": (float | None, "Largest norm; null: not defined."),
        "outliers": (int, "Rows with a huge norm."),
        "not_finite": (int, "Rows that are not finite."),
        "zero_rows": (int, "Rows of zeros."),
        "constant_dimensions": (int, "Dimensions with one value."),
        "duplicates": (int, "Rows that occur more than once."),
        "heavy_dimensions": (list_of(int), "Dimensions that hold most of the variance."),
        "heavy_share": (float, "Their share of the variance (0 to 1)."),
        "subnormal": (float, "Share of values that are subnormal in fp16 (0 to 1)."),
        "hold_out": (str, 'How a training holds rows out by default: "texts", "blocks" or "rows".'),
        "n_held_out": (int, "Rows held out by default; 0: there are too few rows."),
        "n_texts": (int, "Number of texts held out; 0: not known."),
        "copies": (float | None, "Share of the held-out rows with an equal training row (0 to 1); null: not compared."),
        "findings": (
            list_of(
                fields(
                    "Finding",
                    {
                        "severity": (word("ok", "note", "warning", "error"), "Severity."),
                        "sentence": (str, "The finding."),
                        "remedy": (str, 'The remedy; "": none.'),
                    },
                )
            ),
            "Findings for a training; with an error the exit code is 1.",
        ),
    },
)
_PUSHED = fields(
    "Sent to the hub",
    {
        "url": (str, "Its URL."),
        "private": (bool, "Whether it is private."),
        "files": (
            list_of(fields("File", {"path": (str, "Its name on the hub."), "bytes": (int, "Its size.")})),
            "Files.",
        ),
    },
)
_EXPORT = fields(
    "One checkpoint",
    {
        "checkpoint": (str, "The exported checkpoint, an absolute path."),
        "step": (int, "Its step."),
        "output_path": _OUTPUT,
        "saes": (by_name(str), "Sweep: the folder of each SAE by its label."),
        "left_out": (by_name(str), "Sweep: why the format cannot hold an SAE, by its label."),
        "notes": (list_of(str), "What the format does not hold; omitted if it holds everything."),
        "pushed": (_PUSHED, "With --push."),
    },
    may_lack=["saes", "left_out", "notes", "pushed"],
)
_EXPORTED_SET = fields(
    "A set of several runs",
    {
        "checkpoints": (list_of(str), "The exported checkpoints, absolute paths."),
        "output_path": _OUTPUT,
        "layers": (by_name(int), "Step by layer."),
        "left_out": (by_name(str), "Why the format cannot hold an SAE, by its label."),
        "notes": _NOTES,
        "pushed": (_PUSHED, "With --push."),
    },
    may_lack=["left_out", "pushed"],
)
_IMPORT = fields(
    "Imported SAE",
    {
        "run_dir": (str, "The new run folder, an absolute path."),
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
                card("Report card", written_to=(str | None, "Folder of its files; null: they belong to other weights."))
            ),
            "The report card of each SAE.",
        )
    },
)
_ESTIMATE = fields(
    "A training",
    {
        "per_gpu": (_MEMORY, "Memory of each GPU, or of each process on CPUs."),
        **_SPEED,
        "hold_out": (str, 'How rows are held out: "texts", "blocks" or "rows".'),
        "model_gpus": (int, "GPUs that run only the language model."),
        "per_model_gpu": (or_null(_MEMORY), "Memory of each of these GPUs; null: there are none."),
    },
)
_ESTIMATE_OF_EXTRACTION = fields(
    "An extraction",
    {
        "per_gpu": (by_name(int), "Bytes of each part by its name, and `total`."),
        "disk_bytes": (int, "Bytes that the extraction will write."),
        "disk_free_bytes": (int | None, "Free bytes on the output disk; null: not known."),
        **_SPEED,
        "seconds": (float | None, "Estimated duration, in s; null: not known."),
    },
)
_PHASES = ("forward_encode", "forward_rest", "backward", "metrics", "exchange", "update")
_PLAN = typed(
    "How ranks share the work",
    Plan,
    {
        "mode": "Parallel mode.",
        "ranks": "Processes.",
        "latent_ranks": "Ranks that share the latents.",
        "tokens_per_step": "Tokens per step.",
        "micro_batch": "Tokens per micro-batch, on the rank with the most.",
        "micro_batches": "Micro-batches per step.",
        "step_s": "Expected time of a step, in s.",
        "needs_bytes": "Memory of the rank that needs the most, in bytes.",
        "token_shares": "Share of the tokens of each row of ranks.",
        "latent_shares": "Share of the latents of each column of ranks.",
        "reason": 'Why this mode was chosen; "": the job file sets it.',
        "model_share": "Share of a step that the language model takes (0 to 1); 0: no model runs.",
        "text_parts": "Number of parts that the text is split into.",
        "model_gpus": "GPUs that run only the language model.",
        "model_why": 'Why this number was chosen; "": no reason given.',
        "lr": "Full learning rate of each SAE, by its label.",
        "precision": 'Precision of the matrix products; "": not chosen yet.',
    },
)
_BENCH = fields(
    "Steps of a job on this machine",
    {
        "device": (str, "Name of the device."),
        "ranks": (int, "Processes."),
        "torch": (str, "Version of torch."),
        "precision": (str, "Precision of the matrix products."),
        "architecture": (str, "Architecture of the SAE."),
        "optimizer": (str, "Optimizer."),
        "d_in": (int, "Width of the activations."),
        "d_out": (int | None, "Width of the outputs; null: the same."),
        "d_sae": (int, "Latents."),
        "n_saes": (int, "SAEs trained at once."),
        "tokens_per_step": (int, "Tokens per step."),
        "steps": (int, "Steps that were timed."),
        "step_ms": (float, "Median time of a step, in ms."),
        "tokens_per_s": (float, "Tokens per second."),
        "phases_ms": (fields("Phases", {name: (float, "In ms.") for name in _PHASES}), "Mean time of each phase."),
        "floor": (
            fields(
                "Floor",
                {
                    "encoder_product_ms": (float, "The encoder's dense product, in ms."),
                    "traffic_bytes": (float, "Bytes that a step reads and writes."),
                    "bandwidth_bytes_per_s": (float, "Measured memory bandwidth."),
                    "traffic_ms": (float, "Time of this traffic at that bandwidth, in ms."),
                    "floor_ms": (float, "The longer of the two times, in ms."),
                },
            ),
            "Lower bound of the step time on this machine.",
        ),
        "of_floor": (float, "Lower bound divided by the step time (0 to 1)."),
        "peak_memory_bytes": (int | None, "Peak reserved memory; null: not known."),
        "sent_bytes": (float | None, "Bytes that a rank sends per step; null: not counted."),
        "plan": (_PLAN, "The layout that the ranks chose."),
        "expected_step_ms": (float, "Step time predicted by the cost model, in ms."),
    },
)
_PROBE = fields(
    "Devices and the bus between them",
    {
        "device": (str, "Name of the device."),
        "ranks": (int, "Devices."),
        "precision": (str, "Precision of the matrix products."),
        "flops_per_s": (list_of(float), "Operations per second, by rank."),
        "memory_bytes_per_s": (list_of(float), "Memory bandwidth, by rank."),
        "bus_bytes_per_s": (float | None, "Bandwidth of an all-reduce; null: one device."),
        "latency_s": (float | None, "Latency of a small all-reduce, in s; null: one device."),
        "pairs": (by_name(float), "Bytes per second between each pair of devices."),
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
        "outputs": (by_name(str), "Folder of each hook, as `data.path` takes it."),
        "n_tokens": (int, "Rows of each hook."),
        "left_out": (by_name(int), "Rows left out, by reason."),
        "tokens_per_s": (float | None, "Tokens that the model read per second; null: it read no tokens."),
    },
)
_HEADERS = fields(
    "With --headers",
    {
        "shards": (
            list_of(
                typed(
                    "Shard",
                    Shard,
                    {
                        "offset": "Byte of the file at which the first row begins; 0 if rows have to be decoded.",
                        "n_tokens": "Number of rows.",
                        "d_in": "Width of a row.",
                        "dtype": "Type of the stored values.",
                        "lists": "Byte at which the offsets of lists begin, and bytes of each; null: no lists.",
                        "column": "Column of Parquet to decode; null: another format.",
                        "file": "Path of the file.",
                        "first_row": "Number of rows of the file before these.",
                    },
                    {"file": str},
                )
            ),
            "Rows of each file; Arrow files have several entries.",
        ),
        "notes": (list_of(str), "How the files are read, such as files that are skipped."),
    },
)
ANSWERS: dict[str, Schema] = {
    "error": REFUSAL,
    "run": answer("sae-train run --json, in the last line", _RUN),
    "resume": answer("sae-train resume --json, in the last line", _RUN),
    "stop": answer("sae-train stop --json, in the last line", _STOP),
    "extract": answer("sae-train extract --json, in the last line", _EXTRACT),
    "inspect": answer("sae-train inspect --json", _INSPECTION, _HEADERS),
    "export": answer("sae-train export --json", _EXPORT, _EXPORTED_SET),
    "import": answer("sae-train import --json", _IMPORT),
    "eval": answer("sae-train eval --json", _CARDS),
    "estimate": answer("sae-train estimate --json", _ESTIMATE, _ESTIMATE_OF_EXTRACTION),
    "bench": answer("sae-train bench --json", _BENCH),
    "probe": answer("sae-train probe --json", _PROBE),
    "self-test": answer("sae-train self-test --json", _SELF_TEST),
}
