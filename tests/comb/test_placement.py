"""Where documents are read is found by hiding them from one layer at a time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from typer.testing import CliRunner

from comb.cli.main import app
from comb.documents.document import Prompt
from comb.evaluation.placement import Placement, _Batch, hidden_in, measure_placement, short_prompts
from tests.helpers.families import tiny

PROMPTS = [
    (Prompt((3,), ((10, 11, 12, 13), (14, 15)), (20, 21)), (30, 31)),
    (Prompt((3,), ((16, 17, 18),), (22,)), (32,)),
]


@torch.no_grad()
def test_the_one_layer_that_reads_documents_is_found() -> None:
    backbone = tiny("llama")
    for index, layer in enumerate(backbone.model.layers):
        if index != 2:
            layer.self_attn.o_proj.weight.zero_()
    placement = measure_placement(backbone, PROMPTS)
    others = [loss for layer, loss in placement.losses.items() if layer != 2]
    assert max(map(abs, others)) < 1e-6
    # no other layer reads them, so without them is as without this layer's sight of them
    assert placement.losses[2] > 1e-4
    assert placement.best(1) == [2]


@torch.no_grad()
@pytest.mark.parametrize("gaps", [(), ((5,),)])
def test_every_document_is_hidden(gaps: tuple[tuple[int, ...], ...]) -> None:
    backbone = tiny("llama")
    for index, layer in enumerate(backbone.model.layers):
        if index != 2:
            layer.self_attn.o_proj.weight.zero_()
    attention = backbone.model.layers[2].self_attn

    def logprobs(*segments: tuple[int, ...], hidden: bool) -> torch.Tensor:
        batch = _Batch([(Prompt((3,), segments, (20, 21), gaps), (30, 31))], torch.device("cpu"))
        with hidden_in(attention, batch.hidden) if hidden else nullcontext():
            return batch.logprobs(backbone)

    one = (10, 11, 12, 13)
    first, second = (logprobs(one, other, hidden=True) for other in ((14, 15), (40, 41)))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    seen = [logprobs(one, other, hidden=False) for other in ((14, 15), (40, 41))]
    assert (seen[0] - seen[1]).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek_v3", "qwen3_next"])
def test_batches_and_families(family: str) -> None:
    backbone = tiny(family)
    together = measure_placement(backbone, PROMPTS)
    apart = measure_placement(backbone, PROMPTS, batch_tokens=1)
    assert together.losses.keys() == apart.losses.keys() != set()
    assert together.losses == pytest.approx(apart.losses, abs=1e-5)
    assert together.without == pytest.approx(apart.without, abs=1e-5)
    if family == "llama":
        backbone.set_attn_implementation("eager")
        assert measure_placement(backbone, PROMPTS).losses == pytest.approx(together.losses, abs=1e-5)


def test_what_can_not_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="one has none"):
        measure_placement(tiny("llama"), [(Prompt((3,), (), (4,)), (5,))])
    with pytest.raises(ValueError, match="3 cross blocks, but documents can be read in 2 layers"):
        Placement({0: 1.0, 3: 0.5}, 2.0).best(3)
    assert Placement({0: 1.0, 3: 0.5, 2: 0.7}, 2.0).best(2) == [0, 2]
    # the shortest come first, one at least
    assert short_prompts(PROMPTS, 7) == [PROMPTS[1]]
    assert short_prompts(PROMPTS, 1) == [PROMPTS[1]]
    assert short_prompts(PROMPTS, 100) == [PROMPTS[1], PROMPTS[0]]


def test_the_command_shows_layers_and_where_blocks_belong() -> None:
    result = CliRunner().invoke(app, ["info", "nano", "--no-check", "--placement", "nano", "--blocks", "2"])
    assert result.exit_code == 0, result.output
    assert "where documents are read" in result.output
    assert "model.cross_attention_layers=[" in result.output
