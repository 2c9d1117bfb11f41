"""The encoder process: documents come over a socket pair, their keys and values go into the pools.

Started and watched by `supervisor`; it lives as long as the other end of its socket.
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
from collections.abc import Sequence

from comb.cache.store import PICacheStore
from comb_serving.config.logs import configure
from comb_serving.config.serve_options import ServeOptions, instance_dir
from comb_serving.encoding.encoder_worker import EncoderWorker, batches, load
from comb_serving.encoding.protocol import EncodeJob, decode_message, encode_message

logger = logging.getLogger(__name__)

TRIM_EVERY = 16  # batches


def receive(connection: socket.socket, waiting: queue.Queue[EncodeJob | str | None]) -> None:
    """Lets jobs wait as they come, and ends this process when no more can come, however the parent ended."""
    try:
        with connection.makefile("rb") as lines:
            for line in lines:
                message = decode_message(line)
                waiting.put(str(message["forget"]) if "forget" in message else EncodeJob.parse(message))
    except (OSError, KeyError, TypeError, ValueError) as error:
        logger.info("no more documents: %r", error)
    os._exit(0)


def serve(worker: EncoderWorker, connection: socket.socket, waiting: queue.Queue[EncodeJob | str | None]) -> None:
    """Answers jobs, until `receive` ends the process."""
    encoded = threading.Event()  # something that the disk tier may not have
    if worker.store is not None:
        threading.Thread(target=write_behind, args=(worker.store, encoded), daemon=True).start()
    connection.sendall(encode_message(worker.hello()))
    for number, batch in enumerate(batches(waiting), 1):
        if isinstance(batch, str):
            worker.forget(batch)
            continue
        for answer in worker.run(batch):
            connection.sendall(encode_message(answer))
        encoded.set()
        if number % TRIM_EVERY == 0:
            give_memory_back()


def write_behind(store: PICacheStore, encoded: threading.Event) -> None:
    """Writes what has been encoded to the disk tier, for ever: this process may be killed at any time."""
    while encoded.wait():
        encoded.clear()
        try:
            store.flush()
        except Exception:  # a full disk takes nothing from who asks
            logger.exception("could not write documents to the disk tier")


def give_memory_back() -> None:
    """Returns free memory to the system; documents of ever other lengths leave holes in glibc's heap that add up.

    Measured with documents of 256 to 512 tokens: after 1,100 batches 998 MiB instead of 1,250, for 4 ms each time.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as ``python -m comb_serving.encoding.process --index N --socket FD`` with an instance's environment."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--index", type=int, default=0, help="number of this encoder, for its log")
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of the connection")
    parsed = parser.parse_args(arguments)
    connection = socket.socket(fileno=parsed.socket)
    waiting: queue.Queue[EncodeJob | str | None] = queue.Queue()
    threading.Thread(target=receive, args=(connection, waiting), daemon=True).start()  # notices an early end too
    options = ServeOptions.from_environment()
    configure(options.log_format, f"encoder {parsed.index}")
    worker = load(options, instance_dir(), parsed.index)
    logger.info("ready, pid %d", os.getpid())
    serve(worker, connection, waiting)


if __name__ == "__main__":
    main()
