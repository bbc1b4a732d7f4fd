"""Measures how long reading training batches waits for shards from a throttled S3 server.

Run it with moto[server] and s3fs installed (`pip install --target DIR 's3fs' 'moto[server]'`):

    PYTHONPATH=.:tests:DIR python tests/benchmarks/object_storage.py --mb-per-s 200 --step-ms 40

Shards of `--rows` rows of `--width` 16-bit values are uploaded to moto's server, whose answers pass through a token
bucket. A reader takes batches from them as training does, with a sleep of `--step-ms` in place of a step, in windows
of `--shuffle-shards` shards and with a cache that does not hold all shards. Printed are the time until the first
batch, then the waits and the bytes per second until the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BUCKET = "benchmark"


def serve(mb_per_s: float) -> None:
    """Run moto's server, print its port, and send at most this many bytes per second."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    app, lock, free_at, piece = DomainDispatcherApplication(create_backend_app), threading.Lock(), [0.0], 2**20

    def throttled(environ, start_response):  # type: ignore[no-untyped-def]
        for content in app(environ, start_response):
            for first in range(0, len(content), piece):
                part = content[first : first + piece]
                with lock:
                    now = time.monotonic()
                    free_at[0] = max(free_at[0], now - 0.05) + len(part) / (1e6 * mb_per_s)
                    wait_s = free_at[0] - now
                if wait_s > 0:
                    time.sleep(wait_s)
                yield part

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            pass

    server = make_server("127.0.0.1", 0, throttled, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    server.serve_forever()


def make_shards(folder: Path, n_shards: int, n_rows: int, width: int) -> int:
    """Write shards of random rows, and return their size in bytes."""
    import torch
    from safetensors.torch import save_file

    sums, n_bytes = {}, 0
    for number in range(n_shards):
        rows = torch.randint(-(2**13), 2**13, (n_rows, width), dtype=torch.int16).view(torch.bfloat16)
        file = folder / f"shard-{number:05d}.safetensors"
        save_file({"activations": rows.nan_to_num(0.0)}, file)
        sums[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        n_bytes += file.stat().st_size
    (folder / "meta.json").write_text(json.dumps({"shuffled": True, "shards": sums}))
    return n_bytes


def read(options: argparse.Namespace, n_bytes: int) -> None:
    """Read one and a half epochs with steps in between, and print the waits."""
    import torch

    from trainer.activations.open_source import continue_from, open_source
    from trainer.activations.training_data import open_data
    from trainer.contract.settings.job_file import job_of
    from trainer.parallel.base import Parallel

    began = time.perf_counter()
    data = {"path": f"s3://{BUCKET}/acts", "shuffle_shards": options.shuffle_shards}
    data["cache_gb"] = n_bytes / options.shards * (2 * options.shuffle_shards + 2.5) / 1e9
    job = job_of({"data": data, "sae": {"architecture": "topk"}})
    source = open_source(job)
    continue_from(source, job, None)
    training = open_data(source, job, Parallel(torch.device("cpu")))
    n_batches = int(1.5 * training.n_train // options.batch)  # type: ignore[operator]
    waits, asleep, cache = 0.0, 0.0, source.caches[0]
    begins = first_bytes = 0.0

    def batches() -> None:
        for number in range(n_batches):
            slots.acquire()
            training.read(number * options.batch, options.batch)
            taken.release()

    slots, taken = threading.Semaphore(2), threading.Semaphore(0)
    threading.Thread(target=batches, daemon=True).start()
    for number in range(n_batches):
        at = time.perf_counter()
        taken.acquire()
        slots.release()
        if number:
            waits += time.perf_counter() - at
        else:
            begins, first_bytes = time.perf_counter(), cache.n_read
        time.sleep(options.step_ms / 1e3)
        asleep += options.step_ms / 1e3
    seconds = time.perf_counter() - begins
    rate, used = (cache.n_read - first_bytes) / seconds, n_batches * options.batch * options.width * 2 / seconds
    print(f"first batch after {begins - began:.1f} s ({first_bytes / 1e6:,.0f} MB)")
    print(f"then {n_batches} steps in {seconds:.1f} s, waits {100 * waits / seconds:.2f} %")
    print(f"downloads {rate / 1e6:,.0f} MB/s, training uses {used / 1e6:,.0f} MB/s, limit {options.mb_per_s:g} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("shards", 24), ("rows", 8192), ("width", 1024), ("batch", 4096), ("shuffle-shards", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mb-per-s", type=float, default=200.0)
    parser.add_argument("--step-ms", type=float, default=60.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.mb_per_s)
        return
    command = [sys.executable, __file__, "--serve", "--mb-per-s", str(options.mb_per_s)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}"}
            os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            (shards := Path(folder, "acts")).mkdir()
            n_bytes = make_shards(shards, options.shards, options.rows, options.width)
            upload(shards)
            read(options, n_bytes)
        finally:
            server.terminate()


def upload(folder: Path) -> None:
    """Create the bucket, and upload all files of a folder."""
    import s3fs

    s3fs.S3FileSystem().mkdir(BUCKET)
    from trainer.contract.object_store import ObjectStore

    store = ObjectStore(f"s3://{BUCKET}/acts", "data.path")
    for file in folder.iterdir():
        store.put(file, file.name)


if __name__ == "__main__":
    main()
