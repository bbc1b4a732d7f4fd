"""Tests objects read from and written to stores, on memory and folders, with faults injected into requests."""

import os
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from trainer.contract import object_store
from trainer.contract.errors import UserError
from trainer.contract.object_store import TRIES, ObjectStore, checked_url, is_url


class FaultyFileSystem(MemoryFileSystem):
    """Fails the requests whose errors are listed, in order, and may lose the end of what it reads and writes."""

    protocol = "memory"
    store: dict = {}
    pseudo_dirs = [""]
    cachable = False
    failures: list[Exception] = []
    lost_bytes = 0

    def _fail(self):
        if type(self).failures:
            raise type(self).failures.pop(0)

    def find(self, *args, **kwargs):
        self._fail()
        return super().find(*args, **kwargs)

    def cat_file(self, *args, **kwargs):
        self._fail()
        return super().cat_file(*args, **kwargs)

    def info(self, path, **kwargs):
        facts = super().info(path, **kwargs)
        return facts | {"size": facts["size"] - type(self).lost_bytes}


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(FaultyFileSystem, "store", {})
    monkeypatch.setattr(FaultyFileSystem, "failures", [])
    monkeypatch.setattr(FaultyFileSystem, "lost_bytes", 0)
    fsspec.register_implementation("memory", FaultyFileSystem, clobber=True)
    yield FaultyFileSystem
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


@pytest.fixture(params=["memory://bucket/rows", "file"])
def store(request, tmp_path, faulty):
    return ObjectStore(f"file://{tmp_path}/store" if request.param == "file" else request.param, "data.path")


def test_an_object_comes_back_as_it_was_written(store, tmp_path):
    content, n_sent, n_received = os.urandom(3_000_001), [], []
    (tmp_path / "source").write_bytes(content)
    store.put(tmp_path / "source", "layer/shard.bin", n_sent.append)
    store.put(b"{}", "layer/meta.json")
    assert store.list() == {"layer/meta.json": 2, "layer/shard.bin": len(content)}
    assert store.read("layer/shard.bin", 5, 25) == content[5:25]
    store.get("layer/shard.bin", tmp_path / "copy", len(content), n_received.append)
    assert (tmp_path / "copy").read_bytes() == content
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert sum(n_sent) == sum(n_received) == len(content)


def test_removing_ignores_objects_that_do_not_exist(store):
    store.put_together({"a": b"1", "manifest": b"2"}, last="manifest")
    store.remove(["a", "manifest", "missing"], first="manifest")
    assert store.list() == {}


def test_an_object_of_another_size_leaves_no_file(store, tmp_path):
    store.put(b"half", "x")
    with pytest.raises(UserError, match=rf"data.path: .*/x could not be read in {TRIES} tries: it ended after 4 of 8"):
        store.get("x", tmp_path / "copy", 8)
    assert not list(tmp_path.glob("*copy*"))


def test_a_download_ends_as_soon_as_the_object_is_too_large(store, tmp_path):
    n_received = []
    store.put(os.urandom(5 << 20), "x")
    with pytest.raises(UserError, match=r"data.path: .*/x could not be read: it is larger than 8 bytes"):
        store.get("x", tmp_path / "copy", 8, n_received.append)
    assert sum(n_received) == 1 << 20
    assert not list(tmp_path.glob("*copy*"))


def test_a_request_is_repeated_after_failures_that_may_pass(faulty):
    store = ObjectStore("memory://bucket/rows", "data.path")
    store.put(b"content", "x")
    faulty.failures = [ConnectionResetError("reset"), TimeoutError("slow")]
    assert store.read("x") == b"content"
    assert faulty.failures == []


@pytest.mark.parametrize(
    ("error", "message", "tries"),
    [
        (PermissionError("Access Denied"), "access was denied .*check the credentials", 1),
        (OSError("An error occurred (403): Forbidden"), "access was denied", 1),
        (FileNotFoundError("x"), "does not exist; check the name of the bucket", 1),
        (ValueError("bad\x1b[31m"), "could not be read: bad�", 1),
        (OSError("at https://s3/x?X-Amz-Signature=secret"), r"https://s3/x\?…$", TRIES),
    ],
)
def test_a_lasting_failure_is_one_sentence(faulty, error, message, tries):
    faulty.failures = [error] * (TRIES + 1)
    with pytest.raises(UserError, match=f"^data.path: memory://bucket/rows/x.*{message}") as raised:
        ObjectStore("memory://bucket/rows", "data.path").read("x")
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert len(faulty.failures) == TRIES + 1 - tries


def test_a_write_that_the_store_cut_short_fails(faulty):
    faulty.lost_bytes = 1
    with pytest.raises(UserError, match=f"could not be written in {TRIES} tries: the store kept 2 of 3 bytes"):
        ObjectStore("memory://bucket/rows", "data.path").put(b"abc", "x")


def test_names_that_leave_the_folder_or_hide_are_not_listed(faulty):
    store = ObjectStore("memory://bucket/rows", "data.path")
    for name in ("good/x", "../up", "a/../../up", ".hidden", "a/.new", "bad\x1bname"):
        faulty.store[f"/bucket/rows/{name}"] = fsspec.implementations.memory.MemoryFile(data=b"1")
    assert list(store.list()) == ["good/x"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", '"ftp://" is not supported; use one of s3://'),
        ("simplecache::s3://b/x", "is not supported"),
        ("s3://key:secret@bucket/x", "leave keys and passwords out of the URL"),
        ("s3://", "names no folder"),
        ("s3://bucket/../x", "names no folder"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url, message):
    assert is_url(url)
    with pytest.raises(UserError, match=f"^extract.output: .*{message}") as raised:
        checked_url(url, "extract.output")
    assert "secret" not in str(raised.value)


def test_plain_paths_are_not_urls():
    assert not any(map(is_url, ("data/sample", "/tmp/a:b", Path("x"), "C:/x", "s3:/x")))


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"data.path: gs:// needs gcsfs: `.*\[gs\]'`"):
        ObjectStore("gs://bucket/x", "data.path")


@pytest.mark.timeout(30)
def test_a_named_pipe_in_a_shared_folder_is_refused_and_not_opened(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/store", "data.path")
    store.put(b"content", "rows")
    os.mkfifo(tmp_path / "store" / "pipe")
    assert [*store.list()] == ["rows"]
    for read in (store.facts, store.read, lambda name: store.get(name, tmp_path / "copy", 7)):
        with pytest.raises(UserError, match=r"store/pipe could not be read: it is no regular file$"):
            read("pipe")
    assert not (tmp_path / "copy").exists()


def test_a_link_in_a_local_store_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / "store" / "a").symlink_to(tmp_path / "other")
    ObjectStore(f"file://{tmp_path}/store", "train.mirror_checkpoints").put(b"new", "a")
    assert (tmp_path / "store" / "a").read_bytes() == b"new"
    assert (tmp_path / "other").read_bytes() == b"kept"
