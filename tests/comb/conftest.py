"""Fixtures shared by the library's tests: one tiny adapter on a tiny Llama, its gates open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from comb import CombForCausalLM, PICEngine
from tests.helpers.families import open_gates, tiny
from tests.helpers.tiny_engine import idle, make_backbone, make_comb, make_tokenizer


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads only wait for each other; and sums are taken in the same order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> CombForCausalLM:
    """A Llama of four layers with two encoder layers, cross blocks before layers 1 and 3, gates open."""
    torch.manual_seed(1)
    return open_gates(CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2))


@pytest.fixture
def query() -> torch.Tensor:
    """Two rows of nine random tokens."""
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A saved adapter, on a backbone of the Hub."""
    model = open_gates(CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2))
    model.config.backbone_name_or_path = "owner/backbone"
    model.save_pretrained(tmp_path / "my-adapter")
    return tmp_path / "my-adapter"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def backbone() -> LlamaForCausalLM:
    return make_backbone()


@pytest.fixture(scope="module")
def comb_model() -> CombForCausalLM:
    return make_comb()


@pytest.fixture
def engine(comb_model: CombForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[PICEngine]:
    """With method comb; every test ends with nothing referenced."""
    engine = PICEngine(comb_model, tokenizer)
    yield engine
    idle(engine.store)


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backbone and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("backbone")
    make_backbone().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path
