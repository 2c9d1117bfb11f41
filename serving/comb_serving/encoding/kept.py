"""The tiers below a pool, of encoder processes and of vLLM's workers: host memory and files."""

from __future__ import annotations

from pathlib import Path

from comb.cache.store import PICacheStore


def kept_store(
    *, host_bytes: int, disk_path: str | Path | None, disk_bytes: int | None, largest_bytes: int
) -> PICacheStore | None:
    """A store of documents that have left a pool; None without any tier.

    Args:
        largest_bytes: of one document: what goes to the disk goes through memory, where there is always room for it.

    Raises:
        ValueError: for a folder that can't be used.
    """
    if not host_bytes and disk_path is None:
        return None
    return PICacheStore(
        device="cpu",
        device_bytes=max(host_bytes, 0 if disk_path is None else largest_bytes),
        disk_path=disk_path,
        disk_bytes=disk_bytes,
    )


def kept_bytes(store: PICacheStore) -> dict[str, int]:
    """What is kept, by tier; the store's uppermost one is host memory."""
    tiers = store.stats().tiers
    return {name: tiers[tier].bytes for name, tier in (("host", "device"), ("disk", "disk")) if tier in tiers}
