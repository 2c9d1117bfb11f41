"""Any sequence of operations on the store does what a naive model of plain dicts and lists says."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from comb.cache.picache import TokenPICache
from comb.cache.store import AcquiredPICaches, PICacheStore, PICacheTooLargeError, StoreFullError
from comb.cache.tiers import SUFFIX
from tests.helpers.stores import acquire, check_store, files

SIZES = {"a": 8, "b": 8, "c": 16, "d": 16, "e": 24, "f": 32, "huge": 72}  # bytes
DEVICE_BYTES, HOST_BYTES = 64, 40
KEYS = st.sampled_from(sorted(SIZES.keys() - {"huge"}))
ERRORS: dict[type[Exception], tuple[type[Exception], str]] = {
    PICacheTooLargeError: (ValueError, "has 72 bytes.*budget is 64; raise device_bytes"),
    StoreFullError: (RuntimeError, r"no room for \d+ bytes"),
    ZeroDivisionError: (ZeroDivisionError, "by zero"),
}
REQUESTS = st.lists(KEYS, min_size=1, max_size=4) | st.just(["a", "huge"])


class Model:
    """What the store is to do, one thing after another. Dicts are in order of use, oldest first.

    The disk is unbounded, so nothing is lost but by removal, expiry, damage, a restart without a flush, or a time to
    live, with which nothing is written.
    """

    def __init__(self) -> None:
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.disk: set[str] = set()
        self.damaged: set[str] = set()  # on disk, and of no use
        self.references: Counter[str] = Counter()
        self.pins: Counter[str] = Counter()
        self.removed_bytes = 0
        self.generation: Counter[str] = Counter()  # how often the key was compiled
        self.expires_at: dict[str, float] = {}

    def lookup(self, key: str) -> str | None:
        tiers = (("device", self.device), ("host", self.host), ("disk", self.disk))
        return next((name for name, keys in tiers if key in keys), None)

    def acquire(self, keys: list[str], expires_at: float | None, compiles: bool) -> dict[str, str] | type[Exception]:
        """The tier of each key, or the error."""
        unique = list(dict.fromkeys(keys))
        tiers: dict[str, str] = {}
        evicted: list[tuple[str, bool]] = []
        try:
            for key in [key for key in unique if key in self.device]:
                self.references[key] += 1
                self.device[key] = self.device.pop(key)
                tiers[key] = "device"
            missing = [key for key in unique if key not in tiers and not self._promote(key, tiers, evicted)]
            self._move_down(evicted)
            if missing and not compiles:
                return ZeroDivisionError
            self.generation.update(missing)  # compiled, whether or not there is room
            self._admit(missing, tiers, "compiled", evicted)
            for key in missing:
                self.expires_at[key] = expires_at if expires_at is not None else float("inf")
        except (PICacheTooLargeError, StoreFullError) as error:
            return type(error)
        finally:
            self._move_down(evicted)
            for key in tiers:
                self.references[key] -= 1
        self.references.update(unique)
        return tiers

    def _promote(self, key: str, tiers: dict[str, str], evicted: list[tuple[str, bool]]) -> bool:
        if key not in self.host and key in self.damaged:
            self.disk.discard(key)
            self.damaged.discard(key)
        source = self.lookup(key)
        if source is None:
            return False
        self._admit([key], tiers, source, evicted)
        self.host.pop(key, None)
        return True

    def _admit(self, keys: list[str], tiers: dict[str, str], tier: str, evicted: list[tuple[str, bool]]) -> None:
        if any(SIZES[key] > DEVICE_BYTES for key in keys):
            raise PICacheTooLargeError
        kept = {key for key in self.device if self.references[key] or self.pins[key]}
        free = DEVICE_BYTES - self.removed_bytes - sum(SIZES[key] for key in kept)
        if sum(SIZES[key] for key in keys) > free:
            raise StoreFullError
        for key in list(self.device):
            if sum(self.device.values()) + self.removed_bytes + sum(SIZES[k] for k in keys) <= DEVICE_BYTES:
                break
            if key not in kept:
                del self.device[key]
                evicted.append((key, True))
        for key in keys:
            self.device[key] = SIZES[key]
            self.references[key] += 1
            tiers[key] = tier

    def _move_down(self, evicted: list[tuple[str, bool]]) -> None:
        while evicted:
            key, from_device = evicted.pop(0)
            kept = [k for k in self.host if self.pins[k]]
            if not from_device or SIZES[key] + sum(SIZES[k] for k in kept) > HOST_BYTES:
                self.write([key])
                continue
            for victim in [k for k in self.host if k not in kept]:
                if sum(self.host.values()) + SIZES[key] <= HOST_BYTES:
                    break
                del self.host[victim]
                evicted.append((victim, False))
            self.host[key] = SIZES[key]

    def write(self, keys: Iterable[str]) -> int:
        new = {key for key in keys if self.expires_at[key] == float("inf")} - self.disk
        self.disk |= new
        return len(new)

    def remove(self, key: str) -> bool:
        known = self.lookup(key) is not None
        if key in self.device and self.references[key]:
            self.removed_bytes += SIZES[key]
        del self.references[key]
        self.device.pop(key, None)
        self.host.pop(key, None)
        self.disk.discard(key)
        self.damaged.discard(key)
        del self.pins[key]
        self.expires_at.pop(key, None)
        return known


@dataclass
class Handle:
    """What a call holds, with the generations that it must show, and which were removed meanwhile."""

    held: AcquiredPICaches
    generations: dict[str, int]
    removed: set[str] = field(default_factory=set)

    def entries(self) -> dict[str, Any]:
        return {key: entry for key, (entry, _) in self.held._held.items()}


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.now = 0.0
        self.model = Model()
        self.handles: list[Handle] = []
        self.open()

    def open(self) -> None:
        self.store = PICacheStore(
            device_bytes=DEVICE_BYTES,
            host_bytes=HOST_BYTES,
            disk_path=self.folder,
            clock=lambda: self.now,
        )

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(keys=REQUESTS, ttl_s=st.sampled_from([None, None, 5, 10]))
    def use(self, keys: list[str], ttl_s: float | None) -> None:
        before = len(self.handles)
        self.acquire(keys, ttl_s, compiles=True)
        if len(self.handles) > before:
            self.let_go(before)

    @rule(keys=REQUESTS, ttl_s=st.sampled_from([None, None, 5, 10]))
    def hold(self, keys: list[str], ttl_s: float | None) -> None:
        self.acquire(keys, ttl_s, compiles=True)

    @rule(keys=REQUESTS)
    def fail(self, keys: list[str]) -> None:
        self.acquire(keys, None, compiles=False)

    def acquire(self, keys: list[str], ttl_s: float | None, compiles: bool) -> None:
        generation = self.model.generation.copy()
        expected = self.model.acquire(keys, None if ttl_s is None else self.now + ttl_s, compiles)

        def compile(missing: list[str]) -> list[TokenPICache]:
            assert compiles or 1 // 0
            generation.update(missing)
            return [
                TokenPICache("fp", torch.full((SIZES[key] // 8,), generation[key], dtype=torch.int64))
                for key in missing
            ]

        if isinstance(expected, type):
            kind, said = ERRORS[expected]
            with pytest.raises(kind, match=said) as error:
                acquire(self.store, keys, compile, ttl_s)
            assert error.type is expected
        else:
            held = acquire(self.store, keys, compile, ttl_s)
            assert {key: ref.tier for key, ref in held.items()} == expected
            self.handles.append(Handle(held, {key: generation[key] for key in held}))
        assert generation == self.model.generation, "compiled another set of keys than the model"

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.integers(0, len(self.handles) - 1)))

    def let_go(self, index: int) -> None:
        handle = self.handles.pop(index)
        entries = handle.entries()
        handle.held.release()
        handle.held.release()
        for key in handle.generations.keys() - handle.removed:
            self.model.references[key] -= 1
        for key in handle.removed:
            if not any(other.entries().get(key) is entries[key] for other in self.handles):
                self.model.removed_bytes -= SIZES[key]

    def forget(self, key: str) -> bool:
        for handle in self.handles:
            handle.removed |= handle.generations.keys() & {key}
        return self.model.remove(key)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        assert self.store.remove(key) == self.forget(key)

    def clear(self) -> None:
        self.store.clear()
        for key in SIZES:
            self.forget(key)

    @rule(key=KEYS)
    def pin(self, key: str) -> None:
        known = self.model.lookup(key) is not None
        assert self.store.pin(key) == known
        self.model.pins[key] += known

    @rule(key=KEYS)
    def unpin(self, key: str) -> None:
        assert self.store.unpin(key) == (self.model.pins[key] > 0)
        self.model.pins[key] -= self.model.pins[key] > 0

    @rule(seconds=st.sampled_from([1.0, 5.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        expired, before = [k for k, at in self.model.expires_at.items() if at <= self.now], self.store.stats().expired
        assert [self.store.lookup(key) for key in expired] == [None] * len(expired)
        assert self.store.stats().expired - before == len([key for key in expired if self.model.lookup(key)])
        for key in expired:
            self.forget(key)

    @rule(key=KEYS, ttl_s=st.sampled_from([None, 5, 10]))
    def set_expiry(self, key: str, ttl_s: float | None) -> None:
        there = self.model.lookup(key) in ("device", "host")
        assert self.store.set_expiry(key, ttl_s) == there
        if there:
            self.model.expires_at[key] = float("inf") if ttl_s is None else self.now + ttl_s
        if there and ttl_s is not None:
            self.model.disk.discard(key)
            self.model.damaged.discard(key)

    @rule(step=st.sampled_from(["flush"] * 4 + ["clear", "restart", "flush and restart"]))
    def seldom(self, step: str) -> None:
        if "flush" in step:
            self.flush()
        if "clear" in step:
            self.clear()
        if "restart" in step:
            self.restart()

    def flush(self) -> None:
        assert self.store.flush() == self.model.write(self.model.device.keys() | self.model.host.keys())

    def restart(self) -> None:
        """Also what a crash looks like: nobody gets to release anything."""
        old, self.model = self.model, Model()
        self.model.disk, self.model.generation = set(files(self.folder)), old.generation
        self.model.damaged = old.damaged & self.model.disk
        self.model.expires_at = dict.fromkeys(self.model.disk, float("inf"))
        self.handles = []
        self.open()

    @precondition(lambda self: self.model.disk - self.model.damaged)
    @rule(data=st.data(), vanish=st.sampled_from([False] * 3 + [True]))
    def damage(self, data: st.DataObject, vanish: bool) -> None:
        for key in data.draw(st.sets(st.sampled_from(sorted(self.model.disk - self.model.damaged)), min_size=1)):
            path = self.folder / f"{key}{SUFFIX}"
            content = bytearray(path.read_bytes())
            content[-1] ^= 0xFF
            path.unlink()
            if not vanish:
                path.write_bytes(content)
            self.model.damaged.add(key)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "store"):
            return
        check_store(self.store)
        for key in SIZES:
            assert self.store.lookup(key) == self.model.lookup(key), key
        for handle in self.handles:
            for key, generation in handle.generations.items():
                assert handle.held[key].picache.token_ids.tolist() == [generation] * (SIZES[key] // 8)
        stats = self.store.stats()
        assert stats.tiers["device"].bytes == sum(self.model.device.values()) + self.model.removed_bytes
        assert stats.tiers["host"].bytes == sum(self.model.host.values())
        assert stats.tiers["disk"].entries == len(self.model.disk)
        # no file is left behind; a damaged one may be gone
        assert self.model.disk - self.model.damaged <= set(files(self.folder)) <= self.model.disk
        assert stats.pinned == sum(count > 0 for count in self.model.pins.values())
        assert stats.in_use == len({id(e) for handle in self.handles for e in handle.entries().values()})


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_the_store_does_what_the_model_says() -> None:
    run_machine(StoreMachine, settings=SETTINGS)


def forget_to_count(store: PICacheStore, key: str) -> bool:
    return store._device.entries.pop(key, None) is not None


@pytest.mark.parametrize(
    ("target", "mutant"),
    [
        ("comb.cache.store.PICacheStore.remove", forget_to_count),
        ("comb.cache.index.Tier.touch", lambda tier, key: tier.entries.move_to_end(key, last=False)),
        ("comb.cache.index.CacheIndex.is_kept", lambda index, entry: entry.key in index.pins),
        ("comb.cache.tiers.DiskTier.freed", lambda tier, entry: None),
        ("comb.cache.tiers.DiskTier.takes", lambda tier, entry: True),
        ("comb.cache.picache._checksum", lambda metadata, tensors: "always right"),
    ],
)
def test_the_machine_finds_a_broken_store(
    target: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, mutant)
    quick = settings(SETTINGS, database=None, derandomize=True, max_examples=600, phases=[Phase.generate])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_machine(StoreMachine, settings=quick)
