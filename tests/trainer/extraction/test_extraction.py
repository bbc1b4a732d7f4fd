"""Tests that an interrupted extraction writes the same bytes, and that each row is stored or counted as dropped."""

from __future__ import annotations

import hashlib
import itertools
import json
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.combinations import slow_unless
from support.extractions import CPU, extraction_job, run
from torch import Tensor

from trainer.activations.int8_rows import decoded, encoded
from trainer.contract.errors import UsageError, UserError
from trainer.contract.runs.lock import RunLock
from trainer.contract.settings.extract import ExtractJob
from trainer.extraction.extraction import Extraction, ExtractionResult
from trainer.extraction.packing import pack
from trainer.extraction.peers import Alone
from trainer.extraction.state import FIRST, OUTLIERS, SPECIAL, STATE, stored_state
from trainer.extraction.text import documents

Make = Callable[..., ExtractJob]
# The id of a token that occurs in most documents.
COMMON = 261


def digests(job: ExtractJob) -> dict[str, str]:
    """Return the SHA-256 of each file in a job's output, except for the lock file."""
    output = Path(job.extract.output)
    files = [file for file in output.rglob("*") if file.is_file() and file.name != "run.lock"]
    return {str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def tensors(job: ExtractJob, hook: str) -> dict[str, Tensor]:
    """Return a hook's tensors, each concatenated over all shards."""
    shards = [load_file(file) for file in sorted(job.folder(hook).glob("*.safetensors"))]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def with_model(job: ExtractJob, folder: Path) -> ExtractJob:
    return msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, path=str(folder)))


def meta(job: ExtractJob, hook: str) -> dict[str, Any]:
    return json.loads((job.folder(hook) / "meta.json").read_text())


def stop_after(n: int) -> tuple[threading.Event, Callable[[int], None]]:
    """Return an event that stops an extraction, and a callback that sets the event after `n` batches."""
    stop, seen = threading.Event(), []

    def advance(rows: int) -> None:
        seen.append(rows)
        if len(seen) == n:
            stop.set()

    return stop, advance


@pytest.fixture(scope="module")
def example(tiny, corpus, tmp_path_factory) -> tuple[ExtractJob, ExtractionResult]:
    """Return an extraction of 300 rows from three Llama hooks. The last shard is only partly filled."""
    hooks = ["resid_post.1", "mlp_out.0", "layers.1.mlp"]
    job = extraction_job(tiny("llama"), corpus, tmp_path_factory.mktemp("example"), hooks=hooks)
    return job, run(job)


def test_rows_from_all_hooks_belong_to_the_same_tokens(example) -> None:
    job, result = example
    assert (result.state, result.n_tokens) == ("finished", 300)
    assert result.outputs == {hook: str(job.folder(hook)) for hook in job.model.hooks}
    first, *others = (tensors(job, hook) for hook in job.model.hooks)
    assert first["activations"].shape == (300, 32)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in ("token_ids", "positions", "document"))


def test_a_row_is_the_models_activation_at_its_token(example, tiny) -> None:
    job, _ = example
    tokenizer = Extraction(job, CPU, Alone(threading.Event())).model.tokenizer
    made = list(pack(tokenizer.tokens(documents(job.text)), job.text.context))
    model = transformers.AutoModel.from_pretrained(tiny("llama")).eval()
    stored = tensors(job, "resid_post.1")
    for row in range(0, 300, 29):
        document, position = int(stored["document"][row]), int(stored["positions"][row])
        token = int(stored["token_ids"][row])
        candidates = []
        for context in made:
            ids = context.ids[context.documents == document]
            if len(ids) > position and ids[position] == token:
                with torch.inference_mode():
                    states = model(input_ids=torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
                candidates.append(states[2][0, position])
        assert any(torch.allclose(stored["activations"][row], one, atol=1e-3) for one in candidates)


def test_metadata_describes_the_rows_and_their_mean_and_spread(example, tiny) -> None:
    job, result = example
    for hook, name, module in (
        ("resid_post.1", "blocks.1.hook_resid_post", "layers.1"),
        ("layers.1.mlp", "layers.1.mlp", "layers.1.mlp"),
    ):
        facts, x = meta(job, hook), tensors(job, hook)["activations"].double().numpy()
        spread = np.sqrt(x.var(axis=0).sum())
        np.testing.assert_allclose(facts["mean"], x.mean(axis=0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(facts["scale"], spread, rtol=1e-9)
        np.testing.assert_allclose(facts["gamma"], np.linalg.norm(x.mean(axis=0)) / spread, rtol=1e-9)
        assert (facts["hook_name"], facts["hook"], facts["module"]) == (name, hook, module)
        assert (facts["model_name"], facts["model_class"]) == (str(tiny("llama")), "LlamaModel")
        assert (facts["d_in"], facts["n_tokens"], facts["context_size"]) == (32, 300, 32)
        assert facts["documents_share_contexts"]
        assert (facts["tokens_before_text"], facts["tokens_after_text"]) == ([0], [])
        assert facts["left_out"] == result.left_out
        shards = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in job.folder(hook).glob("*.saf*")}
        assert facts["shards"] == shards
        assert len(shards) == 3


def test_metadata_records_the_text_and_tokenizer_and_weights_and_limits(make: Make, tiny) -> None:
    job = make(name="limited", skip_first=2, keep_special=True, max_norm=3.0, column="text", hooks=["resid_post.1"])
    run(job)
    facts, folder = meta(job, "resid_post.1"), tiny("gpt2")
    assert (facts["skip_first"], facts["keep_special"], facts["max_norm"]) == (2, True, 3.0)
    norms = tensors(job, "resid_post.1")["activations"].norm(dim=1)
    assert float(norms.max()) <= facts["norm_limit"] == stored_state(job).limits[0]
    assert (facts["dataset_subset"], facts["dataset_split"], facts["dataset_column"]) == (None, None, "text")
    assert (facts["model_revision"], facts["tokenizer_name"]) == (None, str(folder))
    assert facts["weights_sha256"] == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("config.json", "model.safetensors")
    }
    assert len(facts["tokenizer_sha256"]) == 64
    run(without := make(name="unlimited", max_norm=0.0))
    assert meta(without, "mlp_out.0")["norm_limit"] is None


def test_the_same_job_writes_the_same_bytes_in_any_folder(make: Make) -> None:
    first, second, other = make(name="a"), make(name="b"), make(name="c", seed=1)
    results = [run(job) for job in (first, second, other)]
    assert results[0].left_out == results[1].left_out == results[2].left_out
    assert digests(first) == digests(second)
    # With another seed, each shard has the same rows in a different order.
    shuffled = {name: digest for name, digest in digests(first).items() if not name.endswith("tokens.json")}
    assert all(digests(other)[name] != digest for name, digest in shuffled.items())
    one, another = (tensors(job, "mlp_out.0")["activations"][:128].sum(1) for job in (first, other))
    assert torch.equal(one.sort()[0], another.sort()[0])


# With these sizes, either a shard contains several batches or a batch fills several shards.
@pytest.mark.parametrize(
    ("family", "shard_rows"),
    slow_unless(
        lambda family, shard_rows: (family, shard_rows) in (("gpt2", 17), ("gpt2", 128), ("bert", 100)),
        itertools.product(("gpt2", "bert"), (100, 128, 17, 300)),
    ),
)
def test_an_extraction_stopped_several_times_writes_the_same_files(make: Make, family: str, shard_rows: int) -> None:
    settings = {"shard_rows": shard_rows}
    whole, job = make(family, "whole", **settings), make(family, "stopped", **settings)
    at_once = run(whole)
    results = [run(job, *stop_after(n_batches)) for n_batches in (1, 2, 1)]
    assert [result.state for result in results] == ["stopped"] * 3
    assert all(result.n_tokens % shard_rows == 0 for result in results)
    at_last = run(job)
    assert (at_last.state, at_last.n_tokens, at_last.left_out) == ("finished", 300, at_once.left_out)
    assert digests(job) == digests(whole)


@pytest.mark.parametrize("n_tokens", [300, 10**6])
def test_an_extraction_killed_just_before_its_end_still_writes_the_same_files(
    make: Make, n_tokens: int, monkeypatch
) -> None:
    whole, job = make(name="whole", n_tokens=n_tokens, shard_rows=100), make(n_tokens=n_tokens, shard_rows=100)
    run(whole)

    def cut_off(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr("trainer.extraction.extraction.facts_of_all", cut_off)
        with pytest.raises(InterruptedError):
            run(job)
    assert not stored_state(job).is_finished
    run(job)
    assert digests(job) == digests(whole)


def n_read_of(job: ExtractJob) -> tuple[int, int]:
    """Return the total numbers of tokens and of document pieces in the contexts of a job's text."""
    contexts = list(
        pack(Extraction(job, CPU, Alone(threading.Event())).model.tokenizer.tokens(documents(job.text)), 32)
    )
    return sum(one.ids.size for one in contexts), sum(int((one.positions == 0).sum()) for one in contexts)


@pytest.mark.parametrize(
    ("family", "settings", "special", "first"),
    [
        # For Llama, the first token of each document piece is a special token.
        ("llama", {}, 1, 0),
        ("gpt2", {}, 0, 1),
        ("llama", {"keep_special": True}, 0, 0),
        ("gpt2", {"skip_first": 0}, 0, 0),
    ],
)
def test_each_token_is_stored_or_counted(make: Make, family: str, settings: Any, special: int, first: int) -> None:
    job = make(family, n_tokens=10**6, max_norm=0, **settings)
    n_tokens, n_pieces = n_read_of(job)
    result = run(job)
    assert result.state == "finished"
    assert result.left_out == {SPECIAL: special * n_pieces, FIRST: first * n_pieces, OUTLIERS: 0}
    assert result.n_tokens == n_tokens - (special + first) * n_pieces
    positions = tensors(job, "mlp_out.0")["positions"]
    assert int((positions == 0).sum()) == (0 if special + first else n_pieces)


def test_the_requested_number_of_first_tokens_is_skipped(make: Make) -> None:
    run(job := make(skip_first=3))
    assert int(tensors(job, "mlp_out.0")["positions"].min()) == 3


def test_rows_from_an_encoder_belong_to_its_text_and_not_to_padding(make: Make, corpus: Path) -> None:
    job = make("bert", n_tokens=10**6, max_norm=0)
    result = run(job)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model.path)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert result.n_tokens == sum(map(len, ids))
    assert result.left_out[SPECIAL] == 2 * sum(-(-len(one) // 30) for one in ids)
    assert not meta(job, "mlp_out.0")["documents_share_contexts"]
    stored = tensors(job, "mlp_out.0")
    assert sorted(stored["token_ids"][stored["document"] == 5].tolist()) == sorted(ids[5])


@pytest.fixture
def changed(tiny, tmp_path: Path) -> Callable[[float], Path]:
    """Return a function that copies GPT-2 and scales the embedding of a common token by a given factor."""

    def copy(factor: float) -> Path:
        folder = Path(shutil.copytree(tiny("gpt2"), tmp_path / f"gpt2-{factor}"))
        weights = load_file(folder / "model.safetensors")
        weights["wte.weight"][COMMON] *= factor
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return copy


def test_rows_with_a_huge_norm_are_counted_and_dropped(make: Make, changed) -> None:
    plain, folder = make(name="plain", n_tokens=10**6), changed(1000)
    job = with_model(make(n_tokens=10**6), folder)
    every = with_model(make(name="every", n_tokens=10**6, max_norm=0), folder)
    results = [run(one) for one in (plain, job, every)]
    n_common = int((tensors(plain, "mlp_out.0")["token_ids"] == COMMON).sum())
    assert n_common > 20
    assert [result.left_out[OUTLIERS] for result in results] == [0, n_common, 0]
    assert results[0].n_tokens == results[1].n_tokens + n_common == results[2].n_tokens
    for hook in job.model.hooks:
        assert not (tensors(job, hook)["token_ids"] == COMMON).any()


def test_rows_that_overflow_are_dropped_even_without_a_limit(make: Make, changed) -> None:
    job = with_model(make(n_tokens=10**6, max_norm=0, dtype="fp16"), changed(1e6))
    assert run(job).left_out[OUTLIERS] > 20
    stored = tensors(job, "resid_post.1")
    assert stored["activations"].dtype == torch.float16
    assert stored["activations"].isfinite().all()
    assert not (stored["token_ids"] == COMMON).any()


def test_a_model_whose_rows_all_overflow_is_refused(make: Make, tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("gpt2"), tmp_path / "huge"))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"wpe.weight": weights["wpe.weight"] + 1e5}, folder / "model.safetensors", {"format": "pt"})
    sentence = 'model.dtype: the activations of resid_post.1 overflow; set model.dtype and extract.dtype to "fp32"'
    with pytest.raises(UserError, match=f"^{sentence}$"):
        run(with_model(make(dtype="fp16"), folder))


def test_rows_have_the_requested_dtype_and_metadata_describes_stored_rows(make: Make) -> None:
    run(job := make(dtype="bf16"))
    x = tensors(job, "resid_post.1")["activations"]
    assert x.dtype == torch.bfloat16
    np.testing.assert_allclose(meta(job, "resid_post.1")["mean"], x.double().mean(0).numpy(), rtol=1e-9, atol=1e-12)


def test_if_a_text_ends_early_all_its_rows_are_stored(make: Make) -> None:
    result = run(job := make(n_tokens=10**6, shard_rows=10**6))
    assert result.state == "finished"
    assert 300 < result.n_tokens == len(tensors(job, "mlp_out.0")["activations"])
    assert [file.name for file in job.folder("mlp_out.0").glob("*.safetensors")] == ["shard-00000.safetensors"]


def test_a_text_without_rows_is_refused_and_can_then_be_replaced(make: Make, tmp_path: Path, corpus: Path) -> None:
    (empty := tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match=r"^text.path: the text yields no rows; provide more text$"):
        run(make(text=empty))
    assert run(make()).state == "finished"


@pytest.mark.parametrize("change", [{"seed": 1}, {"context": 16}, {"hooks": ["resid_post.0"]}, {"n_tokens": 301}])
def test_an_output_folder_with_a_different_extraction_is_refused(example, change: dict[str, Any]) -> None:
    job, _ = example
    (name,) = change
    section = {"hooks": "model", "context": "text"}.get(name, "extract")
    other = msgspec.structs.replace(job, **{section: msgspec.structs.replace(getattr(job, section), **change)})
    before = digests(job)
    message = rf"^extract.output: {job.extract.output} contains an extraction with a different .*"
    with pytest.raises(UsageError, match=message):
        Extraction(other, CPU, Alone(threading.Event()))
    assert f"a different {section}.{name}, " in refusal(other)
    assert digests(job) == before


def refusal(job: ExtractJob) -> str:
    with pytest.raises(UsageError) as error:
        stored_state(job)
    return str(error.value)


def test_int8_rows_are_the_encoded_rows_and_a_stopped_extraction_writes_the_same_files(make: Make) -> None:
    exact, whole, job = make(name="exact"), *(make(name=name, dtype="int8", shard_rows=70) for name in ("a", "b"))
    run(exact)
    at_once = run(whole)
    results = [run(job, *stop_after(n_batches)) for n_batches in (1, 2)]
    assert [result.state for result in results] == ["stopped"] * 2
    assert run(job).left_out == at_once.left_out == run(exact).left_out
    assert digests(job) == digests(whole)
    for hook in job.model.hooks:
        shards = [load_file(file) for file in sorted(job.folder(hook).glob("*.safetensors"))]
        (mean,) = {tuple(shard["int8_mean"].tolist()) for shard in shards}
        rows = torch.cat([shard["int8_rows"] for shard in shards])
        expected = tensors(exact, hook)
        places = torch.cat([shard["place"] for shard in shards]).argsort(), expected["place"].argsort()
        x = expected["activations"][places[1]]
        assert torch.equal(rows[places[0]], encoded(x, torch.tensor(mean)))
        first_batch = expected["place"].sort()[0] < 64
        torch.testing.assert_close(torch.tensor(mean), x[first_batch].mean(0))
        read, facts = decoded(rows, torch.tensor(mean)).double(), meta(job, hook)
        spread = float((read - read.mean(0)).square().sum(1).mean().sqrt())
        assert facts["dtype"] == "int8"
        assert facts["scale"] == pytest.approx(spread)
        noise = float((read[places[0]] - x).square().sum(1).mean()) / spread**2
        assert facts["int8_noise"] == pytest.approx(noise, rel=0.1)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "int8"])
def test_a_stopped_extraction_does_not_continue_in_a_different_dtype(make: Make, dtype: str) -> None:
    job = make(dtype=dtype)
    assert run(job, *stop_after(4)).state == "stopped"
    file = Path(job.extract.output) / STATE
    # Pretend that the rows were extracted on a GPU, where another dtype would have been used.
    state = json.loads(file.read_text())
    assert state["computed"] == "float32"
    stored = {"dtype": "bfloat16"} if dtype == "auto" else {}
    file.write_text(json.dumps(state | stored | {"computed": "bfloat16"}))
    was = r"^extract.output: the shards in .* were computed in bfloat16, but this device computes in float32; continue"
    with pytest.raises(UsageError, match=was):
        run(job)


def test_a_finished_extraction_is_recognised_under_a_different_job_name(example) -> None:
    job, result = example
    state = stored_state(msgspec.structs.replace(job, name="other"))
    assert (state.is_finished, state.n_stored, state.left_out) == (True, 300, result.left_out)


def test_extracted_shards_are_not_mixed_with_shards_from_another_source(make: Make) -> None:
    job = make()
    job.folder("mlp_out.0").mkdir(parents=True)
    save_file({"activations": torch.zeros(2, 2)}, job.folder("mlp_out.0") / "shard-00007.safetensors")
    shown = f"extract.output: {job.folder('mlp_out.0')} contains other shards; choose another folder or delete"
    assert refusal(job).startswith(shown)


def test_the_error_for_a_deleted_shard_names_the_shard(make: Make) -> None:
    run(job := make())
    (file := job.folder("mlp_out.0") / "shard-00001.safetensors").unlink()
    shown = f"extract.output: {file} is missing; delete {job.extract.output} or choose another folder"
    assert refusal(job) == shown


def test_an_output_that_is_a_file_or_a_link_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(make(name="file")) == f"extract.output: {tmp_path}/file is not a folder; choose another"
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a symbolic link, and symbolic links are not followed"):
        Extraction(make(name="link"), CPU, Alone(threading.Event()))


def test_an_output_inside_the_text_folder_is_refused(make: Make, tmp_path: Path) -> None:
    reason = "is inside text.path, where all files are read as text; choose another"
    assert refusal(make(text=tmp_path)) == f"extract.output: {tmp_path}/activations {reason}"


def test_an_extraction_into_the_folder_of_a_running_extraction_is_refused(make: Make) -> None:
    job = make()
    Path(job.extract.output).mkdir()
    with RunLock(Path(job.extract.output)), pytest.raises(UserError, match="is still running; stop it, wait until"):
        run(job)


@pytest.mark.parametrize("max_norm", [0.0, 1.1])
def test_reading_ahead_produces_the_same_bytes(make: Make, max_norm: float) -> None:
    """Simulate a GPU, where the extraction waits for a batch's rows only after reading the next batch."""
    whole, job = make(name="whole", max_norm=max_norm), make(max_norm=max_norm)
    run(whole)
    stop, advance = stop_after(4)
    for peers in (Alone(stop, advance), Alone(threading.Event())):
        extraction = Extraction(job, CPU, peers)
        extraction._ahead = 1
        result = extraction.run()
    assert (result.state, stored_state(job).n_stored) == ("finished", 300)
    assert digests(job) == digests(whole)


@pytest.fixture
def fill_disk() -> Iterator[Callable[[int], None]]:
    """Return a function that limits the file size once rows are stored, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda n_stored: resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if n_stored else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_after_a_full_disk_finished_shards_are_kept_and_the_extraction_can_continue(make: Make, fill_disk) -> None:
    whole, job = make(name="whole", n_tokens=900), make(n_tokens=900)
    run(whole)
    # The file that cannot be written may be a shard or the extraction's state file.
    with pytest.raises(UserError, match=r"^[^\n]* could not be written: [^\n]* and try again$"):
        run(job, advance=lambda _: fill_disk(stored_state(job).n_stored))
    fill_disk(0)
    assert 0 < stored_state(job).n_stored < 900
    assert digests(job).items() - digests(whole).items() == {(STATE, digests(job)[STATE])}
    run(job)
    assert digests(job) == digests(whole)


def test_an_extraction_that_would_exceed_the_free_disk_space_is_refused_at_the_start(make: Make) -> None:
    job = make(n_tokens=10**13)
    with pytest.raises(
        UserError, match=r"could not be written: it needs [0-9.,]+ \w+, but only [0-9.]+ \w+ are free; free some"
    ):
        run(job)
    assert not list(Path(job.extract.output).rglob("*.safetensors"))
