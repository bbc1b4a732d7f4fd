"""The answers of `sae-train`, by command.

`run`, `resume`, `stop` and `extract` print the answer as their last line, all other commands print only the answer.
"""

from __future__ import annotations

from trainer.contract.answers.schema import Schema, by_name, fields, list_of, or_null, typed, word
from trainer.contract.answers.shared import HOW_FAR, IMPORT_CHECK, REFUSAL, answer, card, metrics
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.plan import Plan

_OUTPUT = (str, "Folder that was written, an absolute path.")
_STATE = (word("finished", "stopped"), "How it ended; one that was stopped can go on.")
_BYTES = {name: (int, "Bytes of this part.") for name in Memory.__struct_fields__} | {"total": (int, "Bytes in all.")}
_MEMORY = fields("Memory in bytes", _BYTES)
_SPEED = {
    "seconds": (float, "How long it will take, in s."),
    "tokens_per_s": (float, "Tokens per second."),
    "mode": (str, "Parallel mode."),
    "device": (str, 'Kind of GPU, or "CPU".'),
    "is_measured": (bool, "Whether by speeds that were measured on this machine."),
}
_NOTES = (list_of(str), "What a reader should know of it.")

_SAE_OF_A_SWEEP = fields("SAE of a sweep", {"output_path": _OUTPUT} | metrics())
_RUN = fields(
    "Result of a run",
    {
        "run_dir": (str, "Run folder, from which it is resumed; an absolute path."),
        "output_path": _OUTPUT,
        "steps": (int | None, "Steps made; null: none was recorded."),
        "tokens": (int | None, "Tokens trained on; null: none was recorded."),
        "tokens_per_s": (float | None, "Tokens per second; null: not measured."),
        **metrics(),
        "outlier_fraction": (float | None, "Share of rows of enormous norm, left out (0 to 1); null: not measured."),
        "not_finite_fraction": (float | None, "Share of rows that are not finite, left out; null: not measured."),
        **HOW_FAR,
        "best_sae": (str | None, "Of a sweep: which SAE the metrics are of; null: not measured."),
        "saes": (by_name(_SAE_OF_A_SWEEP), "Of a sweep: each SAE by its label."),
        "state": _STATE,
    },
    may_lack=["best_sae", "saes"],
)
_STOP = fields(
    "What was done",
    {
        "run_dir": (str, "Run folder, an absolute path."),
        "message": (str, "What happens next, in a sentence."),
    },
)
_INSPECTION = fields(
    "Stored activations",
    {
        "n_tokens": (int, "Rows in all."),
        "d_in": (int, "Width of a row."),
        "dtype": (str, "As the values are stored."),
        "n_bytes": (int, "Bytes of the files."),
        "n_looked_at": (int, "Rows that were looked at, by chance."),
        "gamma": (float | None, "Distance of the mean from the origin in spreads of the rows; null: not defined."),
        "scale": (float | None, "Root mean square distance from the mean; null: not defined."),
        "median_norm": (float | None, "Median norm of a row; null: not defined."),
        "largest_norm": (float | None, "Largest norm; null: not defined."),
        "outliers": (int, "Rows of enormous norm."),
        "not_finite": (int, "Rows that are not finite."),
        "zero_rows": (int, "Rows of zeros."),
        "constant_dimensions": (int, "Dimensions with one value."),
        "duplicates": (int, "Rows that are there more than once."),
        "heavy_dimensions": (list_of(int), "Dimensions that hold an undue share of the variance."),
        "heavy_share": (float, "That share (0 to 1)."),
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
                        "severity": (word("ok", "note", "warning", "error"), "How bad it is."),
                        "sentence": (str, "What was found."),
                        "remedy": (str, 'What to do; "": nothing.'),
                    },
                )
            ),
            "What follows for a training; with an error the exit code is 1.",
        ),
    },
)
_PUSHED = fields(
    "Sent to the hub",
    {
        "url": (str, "Where it is."),
        "private": (bool, "Whether only its owner sees it."),
        "files": (list_of(fields("File", {"path": (str, "Its name there."), "bytes": (int, "Its size.")})), "Files."),
    },
)
_EXPORT = fields(
    "One checkpoint",
    {
        "checkpoint": (str, "Which checkpoint, an absolute path."),
        "step": (int, "Its step."),
        "output_path": _OUTPUT,
        "saes": (by_name(str), "Of a sweep: the folder of each SAE by its label."),
        "left_out": (by_name(str), "Of a sweep: why the format cannot hold an SAE, by its label."),
        "notes": (list_of(str), "What the format does not hold; left out where that is nothing."),
        "pushed": (_PUSHED, "With --push."),
    },
    may_lack=["saes", "left_out", "notes", "pushed"],
)
_EXPORTED_SET = fields(
    "A set of several runs",
    {
        "checkpoints": (list_of(str), "Which checkpoints, absolute paths."),
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
        "run_dir": (str, "Run folder that was made, an absolute path."),
        "form": (str, "Format that it was read as."),
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
                card("Report card", written_to=(str | None, "Folder of its files; null: they are of other weights."))
            ),
            "One of each SAE.",
        )
    },
)
_ESTIMATE = fields(
    "A training",
    {
        "per_gpu": (_MEMORY, "Of each GPU, or of each process on CPUs."),
        **_SPEED,
        "hold_out": (str, 'How rows are held out: "texts", "blocks" or "rows".'),
        "model_gpus": (int, "GPUs that only run a language model."),
        "per_model_gpu": (or_null(_MEMORY), "Of each of these; null: there are none."),
    },
)
_ESTIMATE_OF_EXTRACTION = fields(
    "An extraction",
    {
        "per_gpu": (by_name(int), "Bytes of each part by its name, and `total`."),
        "disk_bytes": (int, "Bytes that it will write."),
        "disk_free_bytes": (int | None, "Bytes that are free there; null: not known."),
        **_SPEED,
        "seconds": (float | None, "How long it will take, in s; null: not known."),
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
        "tokens_per_step": "Tokens of a step.",
        "micro_batch": "Tokens of a micro-batch, on the fullest rank.",
        "micro_batches": "Micro-batches of a step.",
        "step_s": "Expected time of a step, in s.",
        "needs_bytes": "What the fullest rank needs, in bytes.",
        "token_shares": "Share of the tokens of each row of ranks.",
        "latent_shares": "Share of the latents of each column of ranks.",
        "reason": 'Why this mode; "": it was asked for.',
        "model_share": "Share of a step that a language model takes (0 to 1); 0: none runs.",
        "text_parts": "Parts that the text is read in.",
        "model_gpus": "GPUs that only run a language model.",
        "model_why": 'Why so many; "": nothing to say.',
        "lr": "Full learning rate of each SAE, by its label.",
        "precision": 'Precision of the products; "": not settled.',
    },
)
_BENCH = fields(
    "Steps of a job on this machine",
    {
        "device": (str, "Name of the device."),
        "ranks": (int, "Processes."),
        "torch": (str, "Version of torch."),
        "precision": (str, "Precision of the products."),
        "architecture": (str, "Architecture of the SAE."),
        "optimizer": (str, "Optimizer."),
        "d_in": (int, "Width of the activations."),
        "d_out": (int | None, "Width of the outputs; null: the same."),
        "d_sae": (int, "Latents."),
        "n_saes": (int, "SAEs trained at once."),
        "tokens_per_step": (int, "Tokens of a step."),
        "steps": (int, "Steps that were timed."),
        "step_ms": (float, "Median time of a step, in ms."),
        "tokens_per_s": (float, "Tokens per second."),
        "phases_ms": (fields("Phases", {name: (float, "In ms.") for name in _PHASES}), "Mean time of each phase."),
        "floor": (
            fields(
                "Floor",
                {
                    "encoder_product_ms": (float, "The encoder's dense product, in ms."),
                    "traffic_bytes": (float, "What a step has to read and write."),
                    "bandwidth_bytes_per_s": (float, "Memory bandwidth that was measured."),
                    "traffic_ms": (float, "The traffic at that bandwidth, in ms."),
                    "floor_ms": (float, "The longer of the two, in ms."),
                },
            ),
            "The least time of a step here.",
        ),
        "of_floor": (float, "Floor over time of a step (0 to 1)."),
        "peak_memory_bytes": (int | None, "Most memory that was reserved; null: not known."),
        "sent_bytes": (float | None, "Bytes that a rank sends per step; null: not counted."),
        "plan": (_PLAN, "What the ranks settled on."),
        "expected_step_ms": (float, "Time of a step by the model of costs, in ms."),
    },
)
_PROBE = fields(
    "Devices and the bus between them",
    {
        "device": (str, "Name of the device."),
        "ranks": (int, "Devices."),
        "precision": (str, "Precision of the products."),
        "flops_per_s": (list_of(float), "Operations per second, by rank."),
        "memory_bytes_per_s": (list_of(float), "Memory bandwidth, by rank."),
        "bus_bytes_per_s": (float | None, "Of an all-reduce; null: one device."),
        "latency_s": (float | None, "Of a small all-reduce, in s; null: one device."),
        "pairs": (by_name(float), "Bytes per second between each pair of devices."),
    },
)
_SELF_TEST = fields(
    "Self-test",
    {
        "device": (str, "Name of the device."),
        "ok": (bool, "Whether all checks are right; if not, the exit code is 1."),
        "checks": (int, "How many there were."),
        "failed": (
            list_of(
                fields(
                    "Check",
                    {
                        "part": (str, "Part of the self-test."),
                        "name": (str, "What should be so."),
                        "ok": (bool, "Whether it is."),
                        "found": (by_name({}), "Figures that were found."),
                    },
                )
            ),
            "Those that are wrong.",
        ),
        "seconds": (float, "How long they took, in s."),
    },
)
_EXTRACT = fields(
    "Extraction",
    {
        "state": _STATE,
        "outputs": (by_name(str), "Folder of each hook, as `data.path` takes it."),
        "n_tokens": (int, "Rows of each hook."),
        "left_out": (by_name(int), "Rows left out, by reason."),
        "tokens_per_s": (float | None, "Tokens that the model read per second; null: none was read."),
    },
)
ANSWERS: dict[str, Schema] = {
    "error": REFUSAL,
    "run": answer("sae-train run --json, in the last line", _RUN),
    "resume": answer("sae-train resume --json, in the last line", _RUN),
    "stop": answer("sae-train stop --json, in the last line", _STOP),
    "extract": answer("sae-train extract --json, in the last line", _EXTRACT),
    "inspect": answer("sae-train inspect --json", _INSPECTION),
    "export": answer("sae-train export --json", _EXPORT, _EXPORTED_SET),
    "import": answer("sae-train import --json", _IMPORT),
    "eval": answer("sae-train eval --json", _CARDS),
    "estimate": answer("sae-train estimate --json", _ESTIMATE, _ESTIMATE_OF_EXTRACTION),
    "bench": answer("sae-train bench --json", _BENCH),
    "probe": answer("sae-train probe --json", _PROBE),
    "self-test": answer("sae-train self-test --json", _SELF_TEST),
}
