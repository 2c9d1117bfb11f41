"""Documents of plain models beyond the pool: kept behind the engine's back, fetched, or compiled again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comb_serving.encoding.kept import KeptDocuments, kept_store
from tests.helpers.linked import PROMPTS, LinkedEngine, largest_difference, linked_engine
from tests.helpers.processes import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

ROWS = torch.arange(12.0).view(4, 3)


def documents(**options: Any) -> KeptDocuments:
    given = {"host_bytes": 0, "disk_path": None, "disk_bytes": None, "largest_bytes": ROWS.nbytes, **options}
    store = kept_store(**given)
    return KeptDocuments(store)


def test_what_is_kept_in_memory_is_found_and_the_oldest_goes_first() -> None:
    kept = documents(host_bytes=2 * ROWS.nbytes)
    for number in range(3):
        kept.keep(f"key-{number}", ROWS + number)
    kept.close()
    assert kept.fetch("key-0") is None
    for number in (1, 2):
        found = kept.fetch(f"key-{number}")
        assert torch.equal(found[0], ROWS + number)
        assert found[1] == "host"
    assert kept.nbytes() == {"host": 2 * ROWS.nbytes, "host_size": 2 * ROWS.nbytes}


def test_what_is_forgotten_is_on_no_tier_and_in_no_file(tmp_path: Path) -> None:
    kept = documents(disk_path=tmp_path, host_bytes=4 * ROWS.nbytes)
    for name in ("one", "other"):
        kept.keep(name, ROWS)
    kept.forget("one")  # behind what was to be kept
    kept.forget("unknown")
    kept.close()
    assert [file.name.partition(".")[0] for file in tmp_path.rglob("*") if file.is_file()] == ["other"]
    assert documents(disk_path=tmp_path).fetch("one") is None


def test_files_outlive_the_server_and_ranks_share_budgets_and_not_folders(tmp_path: Path) -> None:
    assert kept_store(host_bytes=0, disk_path=None, disk_bytes=None, largest_bytes=1) is None
    parts = {"disk_path": tmp_path / "kept", "disk_bytes": 2000, "parts": 2}
    one, other = (documents(part=f"rank-{rank}", **parts) for rank in range(2))
    assert one._store.stats().tiers["disk"].budget_bytes == 1000
    one.keep("key", ROWS)
    one.close()
    assert other.fetch("key") is None
    assert documents(part="rank-1", **parts).fetch("key") is None
    rows, tier = documents(part="rank-0", **parts).fetch("key")
    assert torch.equal(rows, ROWS)
    assert tier == "disk"
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_document_comes_back_from_every_tier(llama: Any, tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "kept")}

    def fetched(linked: LinkedEngine, tier: str) -> None:
        """All documents at other places of the pool, without having been compiled."""
        for name in linked.documents:
            assert linked.fetch(name, "naive") == tier
            shorter = (name, 3, list(linked.handles[f"{name}alone"].blocks))
            assert linked.llm.collective_rpc("comb_fetch", args=shorter) == [None]
        for prompt in PROMPTS[:3]:
            (found,) = linked.ask([(prompt, "legolink:4")])
            assert largest_difference(found, linked.reference(prompt, "legolink:4")) < 2e-5

    with linked_engine(llama, kept={"host_bytes": 2**20, **disk}) as linked:
        requests = [linked.compiling(name, salt=name) for name in linked.documents]
        linked.llm.generate(*map(list, zip(*requests, strict=True)), use_tqdm=False)
        kept = linked.layout.bytes_per_token * sum(map(len, linked.documents.values()))
        wait_for(lambda: linked.llm.collective_rpc("comb_kept")[0]["host"] == kept)
        fetched(linked, "host")
        pool, handle = linked.pool, linked.handles["Aalone"]
        pool.kept.keep("odd", torch.zeros(handle.tokens, pool.rows.shape[1], dtype=torch.float16))
        wait_for(lambda: linked.llm.collective_rpc("comb_kept")[0]["host"] > kept)
        assert pool.fetch("odd", handle) is None  # as of a file that another dtype was written into
    with linked_engine(llama, kept=disk) as linked:
        fetched(linked, "disk")
        linked.llm.collective_rpc("comb_forget", args=("A",))
        wait_for(lambda: linked.fetch("A", "naive") is None)
