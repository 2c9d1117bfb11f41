"""The encoder process: documents come over a socket pair, their keys and values go into the pools.

Started and watched by `supervisor`; it lives as long as the other end of its socket. It holds encoder and embedding
table only. With a host or disk tier it keeps what it has encoded (`comb.cache.store`), so that a document that has left
the pool comes back by copy.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from comb import methods
from comb.backbones.loading import resolve_name
from comb.backbones.tokenizer import check_tokenizer, load_tokenizer
from comb.cache.picache import CrossPICache
from comb.cache.store import PICacheStore, PICacheTooLargeError, StoreFullError
from comb.model.modeling import ENCODE_BATCH_TOKENS, CombForCausalLM
from comb_serving.config.instance import configure
from comb_serving.config.serve_options import ServeOptions, instance_dir, pool_path
from comb_serving.encoding.kept import kept_bytes, kept_store
from comb_serving.encoding.protocol import EncodeJob, decode_message, encode_message
from comb_serving.pool.shared_pool import SharedPool

logger = logging.getLogger(__name__)

TRIM_EVERY = 16  # batches


class EncoderWorker:
    """Encodes documents into the pools.

    Args:
        model: the adapter on its backbone; `drop_decoder` it first to save memory.
        pools: one per tensor-parallel rank, in order.
        store: keeps PICaches beyond their time in the pool; None: they are encoded again.
    """

    def __init__(self, model: CombForCausalLM, pools: Sequence[SharedPool], store: PICacheStore | None = None) -> None:
        self.model, self.store = model, store
        self.method = methods.create("comb", model)
        config: Any = model.encoder.config
        all_heads = config.num_key_value_heads
        expected = model.num_cross_layers, config.head_dim, config.sink_tokens, all_heads
        self.parts: list[tuple[SharedPool, slice]] = []  # each rank's pool, and which heads it holds
        for rank, pool in enumerate(pools):
            layout, first = pool.layout, rank * all_heads // len(pools)
            last = first + layout.kv_heads
            self.parts.append((pool, slice(first, last)))
            found = layout.cross_layers, layout.head_dim, layout.sink_tokens, max(last, all_heads)
            if found != expected:
                raise ValueError(
                    f"the pool {pool.path.name} has (cross layers, head_dim, sink tokens, heads) {found}, this "
                    f"adapter {expected}: decoder and encoder were started with different checkpoints"
                )

    def run(self, jobs: Sequence[EncodeJob]) -> list[dict[str, Any]]:
        """Encodes documents in one batch and writes them; answers one message per job.

        One document that fails doesn't take its neighbours with it: they are encoded alone then.
        """
        start = time.perf_counter()
        try:
            tiers = self._write(jobs, {})
        except Exception as error:
            if len(jobs) > 1:
                return [answer for job in jobs for answer in self.run([job])]
            logger.warning("document %s could not be encoded: %s", jobs[0].key[:12], error)
            return [{"job": jobs[0].number, "error": f"{type(error).__name__}: {error}"[:1000]}]
        about = {"seconds": (time.perf_counter() - start) / len(jobs), "kept": self.kept()}
        return [{"job": job.number, "tier": tier, **about} for job, tier in zip(jobs, tiers, strict=True)]

    def _write(self, jobs: Sequence[EncodeJob], compiled: dict[str, Any]) -> list[str]:
        """Fills the pools from the store, or without one. What had to be computed is in `compiled`, come what may."""
        ids = {job.key: job.token_ids for job in jobs}

        def encode(keys: Sequence[str]) -> list[Any]:
            if new := [key for key in keys if key not in compiled]:
                compiled.update(zip(new, self.method.compile([ids[key] for key in new]), strict=True))
            return [compiled[key] for key in keys]

        try:
            if self.store is None:
                self._fill(jobs, encode([job.key for job in jobs]))
                return ["encoded"] * len(jobs)
            with self.store.acquire(list(ids)) as held:
                while missing := held.missing():
                    held.add(encode(missing))
                self._fill(jobs, [held[job.key].picache for job in jobs])
                # the store's uppermost tier is this process's memory
                return [{"compiled": "encoded", "device": "host"}.get(held[job.key].tier, "disk") for job in jobs]
        except (PICacheTooLargeError, StoreFullError) as error:
            # what doesn't fit together may fit one by one; what has been computed isn't computed again
            if len(jobs) > 1:
                return [tier for job in jobs for tier in self._write([job], compiled)]
            logger.warning("document %s is not kept: %s", jobs[0].key[:12], error)
            self._fill(jobs, encode([jobs[0].key]))
            return ["encoded"]

    def _fill(self, jobs: Sequence[EncodeJob], picaches: Sequence[Any]) -> None:
        """Returns when other processes can read them.

        A write that fails is waited for as well: whoever hears of it gives the blocks to other documents, into which a
        GPU must not write any more.
        """
        try:
            for job, picache in zip(jobs, picaches, strict=True):
                assert isinstance(picache, CrossPICache)
                for pool, heads in self.parts:
                    pool.write(job.handle, picache.keys, picache.values, heads)
        finally:
            for pool, _ in self.parts:
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
        return {} if self.store is None else kept_bytes(self.store)


def drop_decoder(model: CombForCausalLM) -> None:
    """Frees every weight that compiling doesn't need; `encode` works on, nothing else does."""
    model.keep_fingerprint()  # it names the whole backbone, so while that is there
    kept = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    for module in (model.backbone, model.cross_blocks):
        for parameter in module.parameters():
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
    longest = model.max_document_tokens + pools[0].layout.sink_tokens
    store = kept_store(
        host_bytes=options.host_bytes, disk_path=options.disk_path, disk_bytes=options.disk_bytes,
        largest_bytes=longest * sum(pool.layout.bytes_per_token for pool in pools),
    )  # fmt: skip
    return EncoderWorker(model, pools, store)


def batches(waiting: queue.Queue[EncodeJob | str | None]) -> Iterator[list[EncodeJob] | str]:
    """What waits, in batches within the budget (padded tokens), until None comes; waits for more meanwhile.

    A key alone is one to be forgotten, behind what was asked before it.
    """
    batch: list[EncodeJob] = []
    while True:
        try:
            job = waiting.get(block=not batch)
        except queue.Empty:
            yield batch
            batch = []
            continue
        together = [*batch, job] if isinstance(job, EncodeJob) else batch
        longest = max((len(one.token_ids) for one in together), default=0)
        if batch and (together is batch or longest * len(together) > ENCODE_BATCH_TOKENS):
            yield batch
            batch = []
        if job is None:
            return
        if isinstance(job, str):
            yield job
        else:
            batch.append(job)


def serve(worker: EncoderWorker, connection: socket.socket, waiting: queue.Queue[EncodeJob | str | None]) -> None:
    """Answers jobs, until `receive` ends the process."""
    encoded = threading.Event()  # something that the disk tier may not have

    def write_behind(store: PICacheStore) -> None:
        """For ever: this process may be killed at any time."""
        while encoded.wait():
            encoded.clear()
            try:
                store.flush()
            except Exception:  # a full disk takes nothing from who asks
                logger.exception("could not write documents to the disk tier")

    if worker.store is not None:
        threading.Thread(target=write_behind, args=(worker.store,), daemon=True).start()
    connection.sendall(encode_message(worker.hello()))
    for number, batch in enumerate(batches(waiting), 1):
        if isinstance(batch, str):
            if worker.store is not None:
                worker.store.remove_document(batch)
            continue
        for answer in worker.run(batch):
            connection.sendall(encode_message(answer))
        encoded.set()
        if number % TRIM_EVERY == 0:
            # documents of ever other lengths leave holes in glibc's heap that add up: with 256 to 512 tokens, after
            # 1,100 batches, 998 MiB instead of 1,250, for 4 ms each time
            with contextlib.suppress(OSError, AttributeError):  # another libc
                ctypes.CDLL(None).malloc_trim(0)


def receive(connection: socket.socket, waiting: queue.Queue[EncodeJob | str | None]) -> None:
    """Lets jobs wait as they come, and ends this process when no more can come, however the parent ended."""
    try:
        with connection.makefile("rb") as lines:
            for line in lines:
                message = decode_message(line)
                waiting.put(str(message["forget"]) if "forget" in message else EncodeJob.parse(message))
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        logger.info("no more documents: %r", error)
    os._exit(0)


def main() -> None:
    """Run as ``python -m comb_serving.encoding.process --socket FD`` with an instance's environment."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of the connection")
    parsed = parser.parse_args()
    connection = socket.socket(fileno=parsed.socket)
    waiting: queue.Queue[EncodeJob | str | None] = queue.Queue()
    threading.Thread(target=receive, args=(connection, waiting), daemon=True).start()  # notices an early end too
    options = ServeOptions.from_environment()
    configure("encoder")
    worker = load(options, instance_dir())
    logger.info("ready, pid %d", os.getpid())
    serve(worker, connection, waiting)


if __name__ == "__main__":
    main()
