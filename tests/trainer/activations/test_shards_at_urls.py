"""Tests that training reads the same rows from a URL as from local shards, and what happens if the store fails."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.remote_shards import URL, D, N, Requests, store_for_a_test, upload, write_shards

from trainer.activations import open_source as open_source_module
from trainer.activations import shards as shards_module
from trainer.activations.open_source import continue_from, open_source
from trainer.activations.shards import ShardCutError, Shards
from trainer.activations.training_data import IndexedData, open_data
from trainer.contract import object_cache
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.object_cache import RowCache, copy_of
from trainer.contract.object_paths import local_path
from trainer.contract.object_store import ObjectStore
from trainer.contract.runs.data_record import DataRecord
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.shards import inspect_shards
from trainer.parallel.base import Parallel

SIZE = N * D * 4
BATCH = 200


def wait_until(holds: Callable[[], object]) -> None:
    ends = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Requests]]:
    yield from store_for_a_test(monkeypatch, tmp_path / "cache")


@pytest.fixture
def local(store: type[Requests], tmp_path: Path) -> Path:
    """Return a folder of shards that are also at `URL`."""
    write_shards(tmp_path / "acts")
    upload(tmp_path / "acts")
    store.reads.clear()
    return tmp_path / "acts"


def opened(
    path: str | Path | list[str], before: DataRecord | None = None, **data: object
) -> tuple[IndexedData, DataRecord]:
    given = {"path": path if isinstance(path, list) else str(path)} | data
    job, problems = parse_job({"data": {key: one for key, one in given.items() if one is not None}})
    assert job, problems
    source = open_source(job)
    record = continue_from(source, job, before)
    training = open_data(source, job, Parallel(torch.device("cpu")))
    assert isinstance(training, IndexedData)
    return training, record


def batches(data: IndexedData, first: int = 0, n: int = 30) -> Iterator[bytes]:
    for position in range(first * BATCH, (first + n) * BATCH, BATCH):
        yield data.read(position, BATCH).x.numpy().tobytes()


def whole_files(folder: Path) -> list[str]:
    return [file.name for file in sorted(folder.glob("shard*")) if (copy := copy_of(file)) and copy.holds == "rows"]


@pytest.mark.parametrize("shuffle_shards", [None, 2])
def test_a_url_yields_the_same_rows_as_local_shards(local: Path, shuffle_shards: int | None) -> None:
    ours, _ = opened(local, shuffle_shards=shuffle_shards)
    others, _ = opened(URL, shuffle_shards=shuffle_shards)
    assert ours.hold_out == others.hold_out == "texts"
    assert list(batches(ours)) == list(batches(others))
    pairs = zip(ours.of_hook(0).held_out(100), others.of_hook(0).held_out(100), strict=True)
    assert all(torch.equal(one[0], other[0]) for one, other in pairs)
    assert torch.equal(ours.of_hook(0).sample(0)[0], others.of_hook(0).sample(0)[0])


@pytest.mark.parametrize("columns", [True, False])
def test_int8_shards_at_a_url_are_decoded_like_local_ones(store: type[Requests], tmp_path: Path, columns: bool) -> None:
    write_shards(tmp_path / "acts", int8=True, columns=columns)
    upload(tmp_path / "acts")
    ours, others = opened(tmp_path / "acts")[0], opened(URL)[0]
    assert list(batches(ours, n=3)) == list(batches(others, n=3))


def test_data_larger_than_the_cache_is_used_in_windows_and_resumes_exactly(
    local: Path, store: type[Requests], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = 7 * SIZE
    data, record = opened(URL, cache_gb=limit / 1e9)
    assert record[0].shuffle_shards == 2
    expected = list(batches(opened(local, shuffle_shards=2)[0]))
    folder = Path(local_path(URL))
    for one, batch in zip(expected, batches(data), strict=True):
        assert one == batch
        assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) <= limit
    # Two and a half epochs need each shard several times.
    assert len(store.whole_reads()) > 12
    # Another machine with a larger disk continues in the same order.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    object_cache.forget_refreshed()
    resumed, _ = opened(URL, before=record)
    assert list(batches(resumed, 17, 3)) == expected[17:20]


def test_two_jobs_with_different_data_share_the_cache(
    store: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 8 * SIZE
    limit, urls, places = 16 * size, (URL, "memory://bucket/more"), (tmp_path / "acts", tmp_path / "more")
    for module in (open_source_module, shards_module):
        monkeypatch.setattr(module, "cache_limit", lambda _: limit)
    reading, expected, n_shuffled = [], [], []
    for number, (url, place) in enumerate(zip(urls, places, strict=True)):
        write_shards(place, 20, columns=False, seed=100 * number, width=8 * D)
        upload(place, url)
        data, (record,) = opened(url)
        n_shuffled.append(record.shuffle_shards)
        expected.append(list(batches(opened(place, shuffle_shards=record.shuffle_shards)[0], n=40)))
        reading.append(batches(data, n=40))
        # The first job fills its share of the cache before the second one starts.
        assert next(reading[-1]) == expected[-1][0]
        files = sorted(Path(local_path(url)).glob("shard*"))
        wait_until(lambda: sum(map(object_cache._is_in_use, files)) >= 2 * n_shuffled[-1])  # noqa: B023
    assert n_shuffled[0] == 3
    assert 1 <= n_shuffled[1] <= 3
    for batch in range(1, 40):
        for ours, theirs in zip(reading, expected, strict=True):
            assert next(ours) == theirs[batch]
        assert sum(object_cache._used(object_cache.objects_folder()).values()) <= limit
    monkeypatch.setattr(open_source_module, "cache_limit", lambda _: 5 * size)
    with pytest.raises(UserError, match=r"^data\.cache_gb: .* next to .* for other jobs, but at least three shards"):
        opened("memory://bucket/more", cache_gb=1)


def test_two_ranks_on_one_machine_download_each_shard_once(local: Path, store: type[Requests]) -> None:
    inspect_shards(URL)
    files = sorted(Path(local_path(URL)).glob("shard*"))
    caches = [RowCache(files, "data.path", 10**9) for _ in range(2)]

    def read(cache: RowCache) -> None:
        cache.want(files)
        for file in files:
            with cache.reading(file):
                assert (local / file.name).read_bytes() == file.read_bytes()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, caches))
    assert sorted(store.whole_reads()) == [file.name for file in files]
    for cache in caches:
        cache.close()


def test_shards_in_use_by_another_job_are_not_evicted(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "PATIENCE_S", 0.1)
    inspect_shards(URL)
    first, second, third = sorted(Path(local_path(URL)).glob("shard*"))[:3]
    ours, other = (RowCache([first, second, third], "data.path", int(5 * 2**16 + 2.5 * SIZE)) for _ in range(2))
    with other.reading(first):
        for file in (second, third):
            with ours.reading(file):
                pass
            ours.want([])
        assert first.read_bytes() == (local / first.name).read_bytes()
        assert whole_files(first.parent) == [first.name, third.name]
        with (
            other.reading(third),
            pytest.raises(UserError, match=r"data\.path: the cache .* may take .* raise data\.c"),
            ours.reading(second),
        ):
            pass
    ours.close()
    other.close()


def test_only_the_header_is_read_to_check_a_job_and_once_until_it_changes(local: Path, store: type[Requests]) -> None:
    expected = inspect_shards(local)
    found = inspect_shards(URL)
    assert [(one.file.name, one.n_tokens, one.offset) for one in found.shards] == [
        (one.file.name, one.n_tokens, one.offset) for one in expected.shards
    ]
    assert sum(last - first for name, first, last in store.reads if name.startswith("shard")) <= 8 * 2**16
    assert (found.shards[0].file.stat().st_mode, found.shards[0].file.parent.stat().st_mode) == (0o100600, 0o40700)
    store.reads.clear()
    object_cache.forget_refreshed()
    write_shards(local, 9)
    upload(local)
    assert inspect_shards(URL).n_tokens == 9 * N
    # The memory store's version is the time of the upload.
    assert {name for name, *_ in store.reads} == {file.name for file in local.glob("shard*")}


def test_training_uses_cached_shards_and_waits_until_the_store_answers_again(
    local: Path, store: type[Requests]
) -> None:
    data, _ = opened(URL, shuffle_shards=1)
    expected = list(batches(opened(local, shuffle_shards=1)[0]))
    failures = itertools.count()

    def fail(name: str, first: int) -> None:
        if 3 < next(failures) < 30:
            raise ConnectionResetError("reset")

    store.before_read = staticmethod(fail)
    assert list(batches(data)) == expected
    assert next(failures) > 30


def test_a_store_that_stays_away_ends_training_with_its_reason(
    local: Path, store: type[Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "PATIENCE_S", 0.3)
    data, _ = opened(URL, shuffle_shards=1)
    reads = batches(data)
    first = next(reads)

    def fail(name: str, first: int) -> None:
        raise ConnectionRefusedError("connection refused")

    store.before_read = staticmethod(fail)
    with pytest.raises(ShardCutError, match=r"^data\.path: memory://.*/shard-\d+.* in 5 tries: connection refused$"):
        list(reads)
    assert first == data.read(0, BATCH).x.numpy().tobytes()


def test_a_shard_that_changed_under_the_run_is_refused(local: Path, store: type[Requests]) -> None:
    data, record = opened(URL, shuffle_shards=1)
    write_shards(local, has_sums=False)
    upload(local)
    with pytest.raises(ShardCutError, match=r"^data\.path: memory://.*/shard-\d+.* has changed since"):
        list(batches(data))
    data.caches[0].close()
    object_cache.forget_refreshed()
    with pytest.raises(JobFileError, match=r"the run was trained on shard-00000.* contains different values"):
        opened(URL, before=record)


def test_rows_that_differ_from_their_recorded_sum_are_not_used(local: Path) -> None:
    content = bytearray((local / "shard-00003.safetensors").read_bytes())
    content[-1] ^= 1
    (local / "shard-00003.safetensors").write_bytes(content)
    upload(local)
    with pytest.raises(ShardCutError, match=r"/shard-00003\.safetensors has another SHA-256 than meta\.json records"):
        list(batches(opened(URL)[0]))


def test_half_an_object_is_refused_in_one_sentence(local: Path) -> None:
    file = local / "shard-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    upload(local)
    with pytest.raises(JobFileError, match=r"^data\.path: .*shard-00002.*is truncated; copy it again$"):
        inspect_shards(URL)


def test_a_full_disk_frees_old_shards_and_then_stops_in_one_sentence(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "PATIENCE_S", 0.1)
    inspect_shards(URL)
    files = sorted(Path(local_path(URL)).glob("shard*"))[:3]
    cache, reserve, n_fit = RowCache(files, "data.path", 10**9), os.posix_fallocate, 2

    def full(descriptor: int, first: int, length: int) -> None:
        if len(whole_files(files[0].parent)) >= n_fit:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, first, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    for file in files:
        with cache.reading(file):
            assert file.read_bytes() == (local / file.name).read_bytes()
        cache.want([])
    assert whole_files(files[0].parent) == [file.name for file in files[1:]]
    n_fit = 0
    with pytest.raises(UserError, match=r"^data\.path: the cache .* free some space"), cache.reading(files[0]):
        pass
    cache.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": URL, "cache_gb": 1e-6}, r"data\.cache_gb: the shards of memory.* at least three shards must fit"),
        ({"path": [URL, "memory://bucket/more"], "cache_gb": 1e-3}, r"data\.cache_gb: .*only the shards of one folder"),
        ({"path": "memory://bucket/acts"}, r"data\.path: there are no .* shards at memory://bucket/acts; .*: h$"),
        ({"path": "memory://bucket/none"}, r"data\.path: there are no .* shards at memory://bucket/none$"),
    ],
)
def test_data_that_cannot_be_used_is_refused_in_one_sentence(
    local: Path, data: dict[str, object], message: str
) -> None:
    upload(local, "memory://bucket/more")
    with pytest.raises(UserError, match=message):
        opened(**data)


def test_a_folder_of_a_hook_and_a_mixture_are_read_from_a_url(local: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "other", 2, columns=False)
    mixed, _ = opened([URL, str(tmp_path / "other")])
    assert list(batches(mixed, n=3)) == list(batches(opened([str(local), str(tmp_path / "other")])[0], n=3))
    # The job's name of the hook is the name of the folder.
    (tmp_path / "of_hooks").mkdir()
    local.rename(tmp_path / "of_hooks" / "resid_post.3")
    upload(tmp_path / "of_hooks" / "resid_post.3", "memory://bucket/of_hooks/resid_post.3")
    ours, others = (
        opened(path, hook="resid_post.3")[0] for path in (tmp_path / "of_hooks", "memory://bucket/of_hooks")
    )
    assert list(batches(ours, n=3)) == list(batches(others, n=3))


def test_two_ranks_that_start_together_read_each_header_once(
    local: Path, store: type[Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without its lock, two threads act like two processes. A rank that replaced a header would replace a mapped file.
    is_waiting, lock = threading.Event(), object_cache.try_lock

    def try_lock(descriptor: int, **kwargs: bool) -> bool:
        if not (is_free := lock(descriptor, **kwargs)):
            is_waiting.set()
        return is_free

    monkeypatch.setattr(object_cache, "try_lock", try_lock)
    monkeypatch.setattr(object_cache, "_refreshing", contextlib.nullcontext())
    store.before_read = staticmethod(lambda name, first: is_waiting.wait(10))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: object_cache.refresh(Path(local_path(URL)), "data.path", lambda _: {}), range(2)))
    assert sorted(name for name, *_ in store.reads if name.startswith("shard")) == sorted(
        file.name for file in local.glob("shard*")
    )


def test_a_copy_that_another_job_removed_is_downloaded_and_mapped_again(local: Path) -> None:
    expected = list(batches(opened(local, shuffle_shards=1)[0]))
    data, _ = opened(URL, shuffle_shards=1)
    found = list(batches(data, n=1))
    folder = Path(local_path(URL))
    whole = whole_files(folder)
    # A file system without holes removes a file instead.
    for file in folder.glob("shard*"):
        if file.name not in whole:
            object_cache._state_of(file, ".json").unlink()
            file.unlink()
    assert found + list(batches(data, 1, 29)) == expected


def test_a_shard_that_is_needed_now_takes_the_room_of_a_later_one(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "PATIENCE_S", 5.0)
    inspect_shards(URL)
    files = sorted(Path(local_path(URL)).glob("shard*"))[:3]
    cache = RowCache(files, "data.path", int(6 * 2**16 + 2.2 * SIZE))
    cache.want(files[1:])
    for file in files[1:]:
        with cache.reading(file):
            pass
    cache.want(files)
    for file in files:
        with cache.reading(file):
            assert file.read_bytes() == (local / file.name).read_bytes()
    cache.close()


def test_several_hooks_resume_with_caches_that_download(
    local: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for hook in ("mlp_out.0", "mlp_out.1"):
        upload(local, f"memory://bucket/hooks/{hook}")
    _, record = opened("memory://bucket/hooks", hook=["mlp_out.0", "mlp_out.1"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    object_cache.forget_refreshed()
    resumed, _ = opened("memory://bucket/hooks", before=record, hook=["mlp_out.0", "mlp_out.1"])
    assert next(batches(resumed))
    assert [cache.n_read > 0 for cache in resumed.caches] == [True, True]


def test_numbers_next_to_the_rows_are_read_in_pieces_even_if_they_are_larger(
    store: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "_PIECE", 2**16)
    n, folder = 50_000, tmp_path / "narrow"
    folder.mkdir()
    save_file({"activations": torch.randn(n, 1), "place": torch.arange(n)}, folder / "0.safetensors")
    upload(folder)
    source = Shards(path=URL)
    (places,) = source.places() or []
    assert np.array_equal(places, np.arange(n))
    assert torch.equal(source.rows(np.arange(n)), Shards(path=str(folder)).rows(np.arange(n)))
    assert max(last - first for name, first, last in store.reads) <= 2**16


def test_a_full_disk_and_a_foreign_header_are_reported_in_one_sentence(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0]}}'
    (folder := tmp_path / "bad").mkdir()
    (folder / "0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2000))
    upload(folder, "memory://bucket/bad")
    with pytest.raises(JobFileError, match="is not a complete safetensors file"):
        inspect_shards("memory://bucket/bad")
    # The file does not keep the cache from making room.
    data, _ = opened(URL, cache_gb=7 * SIZE / 1e9)
    assert len(list(batches(data))) == 30
    data.caches[0].close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, url in (("pwrite", "memory://bucket/columns"), ("fsync", "memory://bucket/headers")):
        upload(local, url)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(UserError, match=r"^data\.path: .*No space left on device"):
                opened(url)


def test_a_shard_that_changed_during_its_download_and_was_restored_is_read_anew(
    local: Path, store: type[Requests], tmp_path: Path
) -> None:
    opened_before, _ = opened(local)
    name, place = "shard-00007.safetensors", "/bucket/acts/h/shard-00007.safetensors"
    inspect_shards(URL)
    before = store.store[place]
    # The other version has a longer header.
    others = {f"{number}": torch.zeros(1) for number in range(200)}
    save_file({"activations": torch.ones(N, D), **others}, tmp_path / name)
    ObjectStore(URL, "data.path").put(tmp_path / name, name)
    after = store.store[place]
    store.store[place] = before

    def swap(read: str, first: int) -> None:
        if read == name:
            store.store[place] = after

    file = Path(local_path(URL)) / name
    cache = RowCache([file], "data.path", 10**9)
    store.before_read = staticmethod(swap)
    with pytest.raises(UserError, match="has changed since"), cache.reading(file):
        pass
    store.before_read, store.store[place] = staticmethod(lambda name, first: None), before
    object_cache.forget_refreshed()
    assert list(batches(opened(URL)[0], n=3)) == list(batches(opened_before, n=3))


def test_a_window_over_several_folders_is_refused(local: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "other", 2)
    with pytest.raises(UserError, match=r"^data\.shuffle_shards: .* only the shards of one folder"):
        opened([str(local), str(tmp_path / "other")], shuffle_shards=1)


def test_a_job_starts_while_another_uses_shards_whose_sums_are_new(
    store: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "_CHANGED_FOR_S", 0.1)
    write_shards(tmp_path / "acts", has_sums=False)
    upload(tmp_path / "acts")
    ours, _ = opened(URL)
    found = list(batches(ours, n=3))
    # The extraction ends, so that its meta.json appears.
    write_shards(tmp_path / "acts")
    ObjectStore(URL, "data.path").put(tmp_path / "acts" / "meta.json", "meta.json")
    object_cache.forget_refreshed()
    assert list(batches(opened(URL)[0], n=3)) == found
