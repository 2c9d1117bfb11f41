"""What many small documents of a long prompt cost the engine's scheduler: rows by the document, bytes by the token."""

from __future__ import annotations

import pickle
import pickletools
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from comb_serving.linking.layout import plan
from comb_serving.linking.methods import LinkMethod

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

DOCUMENT, SEAM = 24, 4


def rows_for(documents: int) -> tuple[list[Any], list[int]]:
    """The rows that compute the seams of so many documents, in steps of eight rows, and their prompt."""
    from comb_serving.vllm.linking.connector import LinkingConnector
    from comb_serving.vllm.linking.scheduler import LinkingScheduler

    prompt = [5 + index % 1000 for index in range(documents * DOCUMENT + 9)]
    spans = [(index * DOCUMENT, DOCUMENT) for index in range(documents)]
    planned = plan(len(prompt), spans, LinkMethod.parse(f"legolink:{SEAM}").recomputed(spans))
    connector: Any = LinkingConnector.__new__(LinkingConnector)
    connector.jobs, connector.behind_seams, connector._loads = {}, {}, []
    connector._matched = {"r": (0, planned, False)}
    link = SimpleNamespace(plan=planned, method=None, looks=False, sources=[None] * documents, length=len(prompt),
                           head=0)  # fmt: skip
    connector.links = {"r": link}
    request = SimpleNamespace(request_id="r", prompt_token_ids=prompt, lora_request=None, num_preemptions=0)
    blocks = SimpleNamespace(get_block_ids=lambda: ([0],))
    connector.update_state_after_alloc(request, blocks, planned.query)
    scheduler: Any = LinkingScheduler.__new__(LinkingScheduler)
    scheduler.connector, scheduler._numbers, scheduler.running = connector, count(), []
    scheduler.max_num_running_reqs, scheduler.use_v2_model_runner = 8, False
    scheduler.finished_req_ids, scheduler.finished_recving_kv_req_ids = set(), set()
    rows = []
    while connector.jobs:
        metadata = SimpleNamespace(composes=[])
        output = SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={}, total_num_scheduled_tokens=0, kv_connector_metadata=metadata
        )
        scheduler._add_seams(output, 64)
        rows += output.scheduled_new_reqs
    return rows, prompt


def test_rows_are_told_their_tokens_without_a_number_for_each() -> None:
    def words(documents: int) -> int:
        """Of what is sent to a worker."""
        return sum(1 for _ in pickletools.genops(pickle.dumps(rows_for(documents)[0])))

    rows, prompt = rows_for(40)
    assert len(rows) == 39  # the first document has no seam
    for index, row in enumerate(rows, 1):
        assert list(row.prompt_token_ids) == prompt[: index * DOCUMENT + SEAM + 1]
        assert row.num_computed_tokens == index * DOCUMENT
    assert words(80) < 2.2 * words(40)
