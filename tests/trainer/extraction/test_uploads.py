"""Tests extractions to a URL: the same bytes as in a local folder, on any machine, whatever the store does."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest
from support.extractions import CPU, extraction_job, run, run_ranks
from support.remote_shards import Requests, store_for_a_test

from trainer.contract.errors import UsageError, UserError
from trainer.contract.object_store import ObjectStore
from trainer.contract.settings.extract import SHARDS_IN_FLIGHT, ExtractJob
from trainer.contract.settings.shards import inspect_shards
from trainer.extraction import uploads
from trainer.extraction.extraction import Extraction
from trainer.extraction.peers import Alone
from trainer.extraction.uploads import METER, restore_progress

URL = "memory://bucket/acts"


class Writes(Requests):
    """Calls `before_write` with an object's name before it is written."""

    before_write: Callable[[str], object] = staticmethod(lambda name: None)

    def _open(self, path: str, mode: str = "rb", **kwargs: object) -> object:
        if "w" in mode:
            type(self).before_write(path.removeprefix("/bucket/acts/"))
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Writes]]:
    monkeypatch.setattr(uploads, "WAIT_S", 0.01)
    monkeypatch.setattr(Writes, "before_write", staticmethod(lambda name: None))
    for _ in store_for_a_test(monkeypatch, tmp_path / "cache"):
        fsspec.register_implementation("memory", Writes, clobber=True)
        yield Writes


@pytest.fixture
def job(tiny: Callable[[str], Path], corpus: Path, tmp_path: Path) -> ExtractJob:
    return extraction_job(tiny("llama"), corpus, tmp_path / "local", shard_rows=32)


def at_url(job: ExtractJob) -> ExtractJob:
    return job.replace("extract", output=URL)


def digests(job: ExtractJob) -> dict[str, str]:
    """Return the SHA-256 of each object or file, except for locks and the progress."""
    if job.extract.output == URL:
        store = ObjectStore(URL, "extract.output")
        contents = {name: store.read(name) for name in store.list()}
    else:
        root = job.local_output
        contents = {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}
    return {
        name: hashlib.sha256(content).hexdigest()
        for name, content in contents.items()
        if name not in ("extraction.json", "run.lock")
    }


def staged(job: ExtractJob) -> list[Path]:
    return list(job.local_output.glob("*/shard*"))


@pytest.mark.parametrize(("n_ranks", "dtype"), [(1, "auto"), (1, "int8"), (2, "int8")])
def test_an_extraction_stopped_on_one_machine_continues_on_another(
    job: ExtractJob, store: type[Writes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_ranks: int, dtype: str
) -> None:
    job = job.replace("extract", dtype=dtype)
    remote, stop, most = at_url(job), threading.Event(), [0]

    def look(name: str) -> None:
        most.append(len(staged(remote)))
        if name.startswith("mlp_out.0/shard-00003"):
            stop.set()

    store.before_write = staticmethod(look)

    def go(one: ExtractJob, folder: str) -> str:
        restore_progress(one)
        return run(one, stop).state if n_ranks == 1 else run_ranks(one, n_ranks, tmp_path / folder, stop)[0].state

    assert go(remote, "first") == "stopped"
    found = ObjectStore(URL, "extract.output").list()
    assert 0 < len([name for name in found if name.endswith(".safetensors")]) < 2 * 10
    stop.clear()
    # Another machine has an empty disk.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    store.before_write = staticmethod(lambda name: None)
    assert go(remote, "second") == "finished"
    assert staged(remote) == []
    assert max(most) <= n_ranks * 2 * (SHARDS_IN_FLIGHT + 1)
    assert go(job, "third") == "finished"
    assert digests(remote) == digests(job)
    assert inspect_shards(f"{URL}/mlp_out.0").n_tokens == 300
    assert METER.words.endswith(" MB/s")


def test_uploads_wait_for_a_store_that_does_not_answer(job: ExtractJob, store: type[Writes]) -> None:
    failures = iter(range(100))

    def fail(name: str) -> None:
        if next(failures, 100) in range(4, 30):
            raise ConnectionResetError("reset")

    store.before_write = staticmethod(fail)
    assert run(at_url(job)).state == run(job).state == "finished"
    assert digests(at_url(job)) == digests(job)


def test_a_store_that_stays_away_ends_the_extraction_and_keeps_its_progress(
    job: ExtractJob, store: type[Writes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PATIENCE_S", 0.1)

    def fail(name: str) -> None:
        if name == "resid_post.1/shard-00004.safetensors":
            raise ConnectionResetError("connection reset")

    store.before_write = staticmethod(fail)
    with pytest.raises(UserError, match=r"^extract\.output: memory.*shard-00004.* in 5 tries: connection reset$"):
        run(at_url(job))
    store.before_write = staticmethod(lambda name: None)
    restore_progress(at_url(job))
    rest = Extraction(at_url(job), CPU, Alone(threading.Event()))
    assert rest._state.n_stored == 4 * 32
    assert rest.run().state == "finished"
    assert run(job).state == "finished"
    assert digests(at_url(job)) == digests(job)


def test_access_denied_is_one_sentence(job: ExtractJob, store: type[Writes]) -> None:
    def deny(name: str) -> None:
        raise PermissionError("Access Denied")

    store.before_write = staticmethod(deny)
    with pytest.raises(
        UserError, match=r"^extract\.output: memory://.* access was denied \(Access Denied\); check the c"
    ):
        run(at_url(job))


def test_a_shard_that_is_missing_or_cut_or_unknown_at_the_url_is_refused(job: ExtractJob, store: type[Writes]) -> None:
    run(at_url(job))
    target, name = ObjectStore(URL, "extract.output"), "mlp_out.0/shard-00002.safetensors"
    content = target.read(name)
    target.put(content[:-1], name)
    with pytest.raises(UsageError, match=rf"/{name} has \d.* bytes instead of .*; delete {URL} or choose another"):
        restore_progress(at_url(job))
    target.remove([name])
    with pytest.raises(UsageError, match=rf"/{name} is missing"):
        restore_progress(at_url(job))
    target.remove(["extraction.json"])
    with pytest.raises(UsageError, match=rf"{URL} contains other shards"):
        restore_progress(at_url(job))


def test_a_url_that_cannot_be_written_is_reported_for_its_setting(job: ExtractJob) -> None:
    for url, message in (("ftp://host/x", "is not supported"), ("s3://key:secret@bucket/x", "leave keys")):
        with pytest.raises(UserError, match=rf"^extract\.output: .*{message}"):
            run(msgspec.structs.replace(job, extract=msgspec.structs.replace(job.extract, output=url)))
