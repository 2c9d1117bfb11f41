"""The encoder process: documents come over a socket, their keys and values go into the pools.

Started and watched by `supervisor`. It holds encoder and embedding table only, takes one connection at a
time, and ends with its parent. With a host or disk tier it keeps what it has encoded (`comb.cache.store`), so that a
document that has left the pool comes back by copy.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comb import methods
from comb.backbones.loading import resolve_name
from comb.backbones.tokenizer import check_tokenizer, load_tokenizer
from comb.cache.picache import CrossPICache
from comb.cache.store import PICacheStore, PICacheTooLargeError, StoreFullError
from comb.model.modeling import ENCODE_BATCH_TOKENS, CombForCausalLM
from comb_serving.config.logs import configure
from comb_serving.config.options import ServeOptions, instance_dir, pool_path
from comb_serving.encoding import frames
from comb_serving.pool.handles import PoolHandle
from comb_serving.pool.pool import SharedPool

logger = logging.getLogger(__name__)

TRIM_EVERY = 16  # batches


@dataclass(frozen=True)
class EncodeJob:
    """One document to encode: where it goes, and the number under which it is answered."""

    number: int
    key: str
    token_ids: tuple[int, ...]
    handle: PoolHandle

    @classmethod
    def parse(cls, message: dict[str, Any]) -> EncodeJob:
        handle = PoolHandle(len(message["token_ids"]), tuple(message["blocks"]))
        return cls(int(message["job"]), str(message["key"]), tuple(message["token_ids"]), handle)


class EncoderWorker:
    """Encodes documents into the pools.

    Args:
        model: the adapter on its backbone; `drop_decoder` it first to save memory.
        pools: one per tensor-parallel rank, in order.
        store: keeps PICaches beyond their time in the pool; None: they are encoded again.
    """

    def __init__(self, model: CombForCausalLM, pools: Sequence[SharedPool], store: PICacheStore | None = None) -> None:
        self.model, self.pools, self.store = model, list(pools), store
        self.changed = threading.Event()  # there may be documents that the disk tier doesn't have
        self.method = methods.create("comb", model)
        config: Any = model.encoder.config
        self.heads = [
            slice(start := rank * config.num_key_value_heads // len(self.pools), start + pool.layout.kv_heads)
            for rank, pool in enumerate(self.pools)
        ]
        expected = len(model.cross_blocks), config.head_dim, config.num_key_value_heads
        for pool, heads in zip(self.pools, self.heads, strict=True):
            found = pool.layout.cross_layers, pool.layout.head_dim, max(heads.stop, config.num_key_value_heads)
            if found != expected:
                raise ValueError(
                    f"the pool {pool.path.name} has (cross layers, head_dim, heads) {found}, this adapter {expected}: "
                    "decoder and encoder were started with different checkpoints"
                )

    def run(self, jobs: Sequence[EncodeJob]) -> list[dict[str, Any]]:
        """Encodes documents in one batch and writes them; answers one message per job.

        One document that fails doesn't take its neighbours with it: they are encoded alone then.
        """
        start = time.perf_counter()
        try:
            tiers = self._write(jobs)
        except Exception as error:
            if len(jobs) > 1:
                return [answer for job in jobs for answer in self.run([job])]
            logger.warning("document %s could not be encoded: %s", jobs[0].key[:12], error)
            return [{"job": jobs[0].number, "error": f"{type(error).__name__}: {error}"}]
        seconds = (time.perf_counter() - start) / len(jobs)
        about = {"seconds": seconds, "kept": self.kept()}
        return [{"job": job.number, "tier": tier, **about} for job, tier in zip(jobs, tiers, strict=True)]

    def _write(self, jobs: Sequence[EncodeJob], compiled: dict[str, Any] | None = None) -> list[str]:
        compiled = {} if compiled is None else compiled
        try:
            return self._keep_and_fill(jobs, compiled)
        except (PICacheTooLargeError, StoreFullError) as error:
            # what doesn't fit together may fit one by one; what has been computed isn't computed again
            if len(jobs) > 1:
                return [tier for job in jobs for tier in self._write([job], compiled)]
            (job,) = jobs
            logger.warning("document %s is not kept: %s", job.key[:12], error)
            found = compiled.get(job.key)
            self._fill(jobs, self.method.compile([job.token_ids]) if found is None else [found])
            return ["encoded"]

    def _keep_and_fill(self, jobs: Sequence[EncodeJob], compiled: dict[str, Any]) -> list[str]:
        """Fills the pools from the store, or without one. What had to be computed is in `compiled`, come what may."""

        def compile(missing: Sequence[int]) -> list[Any]:
            new = [jobs[index] for index in missing if jobs[index].key not in compiled]
            if new:
                picaches = self.method.compile([job.token_ids for job in new])
                compiled.update(zip((job.key for job in new), picaches, strict=True))
            return [compiled[jobs[index].key] for index in missing]

        if self.store is None:
            self._fill(jobs, compile(range(len(jobs))))
            return ["encoded"] * len(jobs)
        with self.store.acquire([job.key for job in jobs], compile) as handles:
            self._fill(jobs, [handle.picache for handle in handles])
            # the store's uppermost tier is this process's memory
            return [{"compiled": "encoded", "device": "host"}.get(handle.tier, "disk") for handle in handles]

    def _fill(self, jobs: Sequence[EncodeJob], picaches: Sequence[Any]) -> None:
        """Returns when other processes can read them."""
        for job, picache in zip(jobs, picaches, strict=True):
            assert isinstance(picache, CrossPICache)
            for pool, heads in zip(self.pools, self.heads, strict=True):
                pool.write(job.handle, picache.keys, picache.values, heads)
        for pool in self.pools:
            pool.finish()

    def hello(self) -> dict[str, Any]:
        """What the manager must know before the first document."""
        return {
            "fingerprint": self.model.fingerprint,
            "dtype": str(self.model.encoder.dtype).removeprefix("torch."),
            "max_document_tokens": self.model.max_document_tokens,
            "vocab_size": self.model.info.vocab_size,
            "kept": self.kept(),
        }

    def kept(self) -> dict[str, int]:
        """Bytes that this process keeps for documents that have left the pool, by tier."""
        if self.store is None:
            return {}
        tiers = self.store.stats().tiers
        # the store's uppermost tier is this process's memory
        return {name: tiers[tier].bytes for name, tier in (("host", "device"), ("disk", "disk")) if tier in tiers}


def drop_decoder(model: CombForCausalLM) -> None:
    """Frees every weight but the encoder's and the embedding table's; `encode` works on, nothing else does."""
    _ = model.fingerprint  # names the whole backbone's shapes, so while they are there
    kept = {id(parameter) for parameter in (*model.encoder.parameters(), *model.get_input_embeddings().parameters())}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


def load(options: ServeOptions, folder: Path) -> EncoderWorker:
    """The worker of an instance, in the dtype of its pools.

    Raises:
        FileNotFoundError: while the pools aren't complete.
        ValueError: checkpoint, tokenizer and pools don't belong together.
    """
    pools = [SharedPool.attach(pool_path(folder, rank)) for rank in range(options.ranks)]
    device = options.encoder_device
    if device == "auto":
        near = pools[0].tensor.device  # where nothing needs to be copied over
        device = str(near) if near.type == "cuda" else "cuda" if torch.cuda.is_available() else "cpu"
    backbone: dict[str, Any] = {} if options.backbone is None else {"backbone": resolve_name(options.backbone)}
    checkpoint = resolve_name(options.checkpoint)
    model = CombForCausalLM.from_pretrained(checkpoint, dtype=pools[0].layout.torch_dtype, **backbone)
    check_tokenizer(model, load_tokenizer(checkpoint, model))
    drop_decoder(model)
    model.encoder.to(device)
    model.get_input_embeddings().to(device)
    store = None
    if options.host_bytes or options.disk_path is not None:
        # what goes to the disk goes through memory: there is always room for one document
        longest = model.max_document_tokens * sum(pool.layout.bytes_per_token for pool in pools)
        store = PICacheStore(
            device="cpu",
            device_bytes=max(options.host_bytes, 0 if options.disk_path is None else longest),
            disk_path=options.disk_path,
            disk_bytes=options.disk_bytes,
        )
    return EncoderWorker(model, pools, store)


def listen(path: Path) -> socket.socket:
    """A Unix socket that only this user may connect to. Raises ValueError if the path is too long for one."""
    if len(os.fsencode(path)) > 107:
        raise ValueError(f"the path of a Unix socket has at most 107 bytes, {path} has more: use a shorter folder")
    path.unlink(missing_ok=True)  # of an earlier process in this place, which has ended
    server = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(mask)
    server.listen(1)
    return server


def serve(worker: EncoderWorker, server: socket.socket) -> None:
    """Answers one connection after the other, for ever."""
    while True:
        connection, _ = server.accept()
        with connection:
            try:
                connection.sendall(frames.encode(worker.hello()))
                _serve_connection(worker, connection)
            except ConnectionError as error:
                logger.info("connection ended: %s", error)


def _serve_connection(worker: EncoderWorker, connection: socket.socket) -> None:
    waiting: queue.Queue[EncodeJob | None] = queue.Queue()

    def read() -> None:
        try:
            while True:
                waiting.put(EncodeJob.parse(frames.receive_blocking(connection)))
        except (OSError, KeyError, TypeError, ValueError) as error:
            logger.info("no more documents: %r", error)
            waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    held: EncodeJob | None = None
    for number in itertools.count(1):
        first = waiting.get() if held is None else held
        if first is None:
            return
        batch, held, ended = take_batch(first, waiting)
        for answer in worker.run(batch):
            connection.sendall(frames.encode(answer))
        worker.changed.set()
        if number % TRIM_EVERY == 0:
            give_memory_back()
        if ended:
            return


def give_memory_back() -> None:
    """Returns free memory to the system; documents of ever other lengths leave holes in glibc's heap that add up.

    Measured with documents of 256 to 512 tokens: after 1,100 batches 998 MiB instead of 1,250, for 4 ms each time.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def take_batch(
    first: EncodeJob, waiting: queue.Queue[EncodeJob | None]
) -> tuple[list[EncodeJob], EncodeJob | None, bool]:
    """`first` and what is waiting behind it within the budget (padded tokens); one that doesn't fit; whether it ended.

    Documents that write the same key are never in one batch twice: the manager asks for each once.
    """
    batch, longest = [first], len(first.token_ids)
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return batch, None, False
        if job is None:
            return batch, None, True
        longest = max(longest, len(job.token_ids))
        if longest * (len(batch) + 1) > ENCODE_BATCH_TOKENS:
            return batch, job, False
        batch.append(job)


def write_behind(worker: EncoderWorker) -> None:
    """Writes what has been encoded to the disk tier, for ever: this process may be killed at any time."""
    assert worker.store is not None
    while worker.changed.wait():
        worker.changed.clear()
        try:
            worker.store.flush()
        except Exception:  # a full disk takes nothing from who asks
            logger.exception("could not write documents to the disk tier")


def _end_with_parent() -> None:
    """Ends this process when the parent's end of its standard input closes, however the parent ended."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as ``python -m comb_serving.encoding.process --index N`` with an instance's environment."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--index", type=int, default=0, help="number of this encoder, which names its socket")
    index = parser.parse_args(arguments).index
    _end_with_parent()
    folder, options = instance_dir(), ServeOptions.from_environment()
    configure(options.log_format, f"encoder {index}")
    worker = load(options, folder)
    if worker.store is not None:
        threading.Thread(target=write_behind, args=(worker,), daemon=True).start()
    server = listen(socket_path(folder, index))
    logger.info("ready, pid %d", os.getpid())
    serve(worker, server)


def socket_path(folder: Path, index: int) -> Path:
    """Where encoder `index` listens."""
    return folder / f"encoder-{index}.sock"


if __name__ == "__main__":
    main()
