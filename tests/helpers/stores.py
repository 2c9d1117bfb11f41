"""Small PICaches whose content tells their key, and stores of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from comb.cache.index import CacheIndex
from comb.cache.picache import PICache, TokenPICache
from comb.cache.store import AcquiredPICaches, PICacheStore
from comb.cache.tiers import SUFFIX

if TYPE_CHECKING:
    from comb_serving.manager.manager import PICManager

TOKENS = 4
NBYTES = 8 * TOKENS


class Compiler:
    """Compiles key "k7" to a PICache full of sevens, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def __call__(self, keys: Sequence[str]) -> list[TokenPICache]:
        self.compiled += keys
        return [pic(key) for key in keys]


def pic(key: str) -> TokenPICache:
    return TokenPICache("fp", torch.full((TOKENS,), int(key[1:]), dtype=torch.int64))


def acquire(
    store: PICacheStore, keys: Sequence[str], compile: Callable[[list[str]], Sequence[Any]], ttl_s: float | None = None
) -> AcquiredPICaches:
    """Holds all of them, or raises."""
    held = store.acquire(keys, ttl_s=ttl_s)
    try:
        while missing := held.missing():
            held.add(compile(missing))
    except BaseException:
        held.release()
        raise
    return held


def use(store: PICacheStore, *keys: str, ttl_s: float | None = None) -> list[str]:
    """Acquires and releases; returns the tiers. Checks the contents and the store."""
    with acquire(store, keys, Compiler(), ttl_s) as held:
        for key in keys:
            assert held[key].picache.token_ids.tolist() == pic(key).token_ids.tolist()
            assert held[key].hit == (held[key].tier != "compiled")
        tiers = [held[key].tier for key in keys]
    check_store(store)
    return tiers


def hold(store: PICacheStore, *keys: str) -> AcquiredPICaches:
    return acquire(store, keys, Compiler())


def check_index(index: CacheIndex[Any]) -> None:
    for name, tier in index.tiers.items():
        assert tier.used == sum(entry.size for entry in (*tier.entries.values(), *index.held) if entry.tier == name)
        assert tier.budget is None or tier.used <= tier.budget
        for key, entry in tier.entries.items():
            assert (key, name) == (entry.key, entry.tier)
            assert entry.references >= 0
    found = {id(entry) for tier in index.tiers.values() for entry in tier.entries.values()}
    assert all(entry.references > 0 and id(entry) not in found for entry in index.held)
    assert all(count > 0 for count in index.pins.values())


def check_store(store: PICacheStore) -> None:
    """The store's invariants. Cheap enough to call whenever it is idle."""
    device, host = store._device.entries, store._host.entries
    with store._changed:
        check_index(store._index)
        assert all(entry.value.nbytes == entry.size for entry in (*device.values(), *host.values()))
        assert not any(entry.references for entry in host.values())
        assert device.keys().isdisjoint(host)
        assert all(claim.owner.is_alive() for claim in store._index.claims.values())


def check_manager(manager: PICManager) -> None:
    """The invariants of the server's pool."""
    check_index(manager.index)
    entries = {*manager.pool.entries.values(), *manager.index.held}
    taken = [block for entry in entries for block in entry.value.blocks]
    assert sorted(taken + manager.free_blocks) == list(range(manager.layout.num_blocks))  # free, or one document's
    assert all(entry in entries and entry.references for entry in manager._encoding)
    for entry in entries:
        assert len(entry.value.blocks) == entry.size == manager.layout.blocks_for(entry.value.tokens)


def same(ours: Sequence[PICache], theirs: Sequence[PICache]) -> bool:
    """Whether all PICaches are equal, bit for bit."""

    def content(picache: PICache) -> list[Any]:
        tensors = picache.tensors().items()
        bits = [(name, t.dtype, t.shape, t.contiguous().view(torch.uint8).tolist()) for name, t in sorted(tensors)]
        return [type(picache), picache.fingerprint, *bits]

    return [content(each) for each in ours] == [content(each) for each in theirs]


def files(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(SUFFIX) for path in folder.iterdir())


def with_metadata(data: bytes, **changes: str) -> bytes:
    """The file with other metadata, as a program that knows the format would write it."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"].update(changes)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
