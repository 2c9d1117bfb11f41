"""What is measured where no text is needed: a model with random weights, random segments, and the first token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comb.backbones.identity import backbone_of
from comb.cache.picache import PICache
from comb.methods.base import Method


def random_model(
    *, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, positions: int, hybrid: bool = False,
    seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> Any:  # fmt: skip
    """A Llama with random weights, the same for the same seed, dtype and kind of device.

    Args:
        hybrid: a Qwen3.5 instead, three gated DeltaNet layers to each full one.
        device: where weights are drawn: those of an 8B model take a CPU core minutes, a GPU less than a second.

    Raises:
        ValueError: if the sizes don't go together.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

    if min(layers, hidden, heads, kv_heads, vocab) < 1 or hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ValueError(
            f"no Llama has hidden={hidden}, heads={heads}, kv_heads={kv_heads}: heads must divide hidden into an even "
            "size, and kv_heads must divide heads"
        )
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": positions,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if hybrid:
        width = hidden // heads
        kinds = ["full_attention" if index % 4 == 3 or index == layers - 1 else "linear_attention"
                 for index in range(layers)]  # fmt: skip
        config: Any = Qwen3_5TextConfig(
            **sizes, head_dim=width, layer_types=kinds, linear_num_key_heads=heads, linear_num_value_heads=heads,
            linear_key_head_dim=width, linear_value_head_dim=width,
        )  # fmt: skip
    else:
        config = LlamaConfig(**sizes)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@dataclass(frozen=True)
class RandomPrompt:
    """The segments and the query of one measurement, as token ids."""

    segments: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]

    @classmethod
    def random(cls, model: Any, tokens: int, segment_tokens: int, query_tokens: int, seed: int = 0) -> RandomPrompt:
        """`tokens` random ids cut into segments of `segment_tokens` (the last may be shorter), and a query."""
        vocabulary = len(backbone_of(model).get_input_embeddings().weight)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (tokens + query_tokens,), generator=generator).tolist()
        cuts = range(0, tokens, segment_tokens)
        return cls(tuple(tuple(ids[cut : min(cut + segment_tokens, tokens)]) for cut in cuts), tuple(ids[tokens:]))

    @property
    def flat(self) -> list[int]:
        """The whole prompt."""
        return [*(token for segment in self.segments for token in segment), *self.query]


def first_token(method: Method, picaches: Sequence[PICache], query: Sequence[int]) -> dict[str, float]:
    """Seconds by stage from PICaches to the first token: the method's own, other linking, the first token."""
    start = time.perf_counter()
    state = method.link(picaches, query)
    synchronize(method.backbone.device)
    linked_at = time.perf_counter()
    state.logits.argmax(-1).cpu()
    end = time.perf_counter()
    own = dict(state.seconds)
    rest = max(0.0, linked_at - start - sum(own.values()))
    return {**own, "other linking": rest, "first token": end - linked_at}


def check_logits(what: str, logits: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError, beginning with `what`, unless logits are those wanted, up to rounding in the model's dtype."""
    # sums may be taken in another order: roundings at the size of the largest logit
    allowed = 16 * torch.finfo(dtype).eps * float(wanted.abs().max())
    difference = float((logits - wanted).abs().max())
    if not difference <= allowed:
        raise ValueError(
            f"check failed: {what} by {difference:.2g} in a logit (allowed: {allowed:.2g}); no time would mean anything"
        )


def synchronize(device: torch.device) -> None:
    """Waits for what was launched on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
