"""The tiers below a pool, of encoder processes and of vLLM's workers: host memory and files."""

from __future__ import annotations

from pathlib import Path

from comb.cache.store import PICacheStore


def kept_store(
    *,
    host_bytes: int,
    disk_path: str | Path | None,
    disk_bytes: int | None,
    largest_bytes: int,
    part: str = "",
    parts: int = 1,
) -> PICacheStore | None:
    """A store of documents that have left a pool; None without any tier.

    Args:
        host_bytes: of this store.
        disk_path, disk_bytes: of all `parts` stores together; each has its share, in a folder named after `part`, as no
            two processes share one.
        largest_bytes: of one document: what goes to the disk goes through memory, where there is always room for it.

    Raises:
        ValueError: for a folder that can't be used.
    """
    if not host_bytes and disk_path is None:
        return None
    if disk_path is not None and part:
        Path(disk_path).mkdir(mode=0o700, parents=True, exist_ok=True)
        disk_path = Path(disk_path) / f"{part}-of-{parts}"
    return PICacheStore(
        device="cpu",
        device_bytes=max(host_bytes, 0 if disk_path is None else largest_bytes),
        disk_path=disk_path,
        disk_bytes=None if disk_bytes is None else disk_bytes // parts,
    )


def kept_bytes(store: PICacheStore) -> dict[str, int]:
    """What is kept, by tier; the store's uppermost one is host memory."""
    tiers = store.stats().tiers
    return {name: tiers[tier].bytes for name, tier in (("host", "device"), ("disk", "disk")) if tier in tiers}
