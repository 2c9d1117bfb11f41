"""Small PICaches whose content tells their key, and stores of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from comb.cache.picache import TokenPICache
from comb.cache.store import PICacheRefs, PICacheStore
from comb.cache.tiers import SUFFIX

TOKENS = 4
NBYTES = 8 * TOKENS


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Compiler:
    """Compiles key "k7" to a PICache full of sevens, and remembers what it was asked for."""

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens = tokens
        self.compiled: list[str] = []

    def __call__(self, keys: Sequence[str]) -> Callable[[list[int]], list[TokenPICache]]:
        def compile(indices: list[int]) -> list[TokenPICache]:
            self.compiled += [keys[index] for index in indices]
            return [pic(keys[index], self.tokens) for index in indices]

        return compile


def pic(key: str, tokens: int = TOKENS) -> TokenPICache:
    return TokenPICache("fp", torch.full((tokens,), int(key[1:]), dtype=torch.int64))


def use(store: PICacheStore, *keys: str, ttl_s: float | None = None) -> list[str]:
    """Acquires and releases; returns the tiers. Checks the contents and the store."""
    with store.acquire(keys, Compiler()(keys), ttl_s=ttl_s) as handles:
        for key, handle in zip(keys, handles, strict=True):
            assert handle.picache.token_ids.tolist() == pic(key).token_ids.tolist()
            assert handle.hit == (handle.tier != "compiled")
        tiers = [handle.tier for handle in handles]
    store.check_integrity()
    return tiers


def hold(store: PICacheStore, *keys: str) -> PICacheRefs:
    return store.acquire(keys, Compiler()(keys))


def fail(indices: list[int]) -> list[TokenPICache]:
    raise RuntimeError("compile failed")


def files(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(SUFFIX) for path in folder.iterdir())


def with_metadata(data: bytes, **changes: str) -> bytes:
    """The file with other metadata, as a program that knows the format would write it."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"].update(changes)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
