"""What questions look at, heard from vLLM's attention layers in a step that computes them over linked documents.

The sums of the library's `QueryLook`, which a rule like focus chooses by. All that is reached into here has no official
way. Seen in vLLM 0.32 and 0.33:

- ``impl.forward(layer, query, ...)`` of an ``Attention``, called by the op ``unified_attention_with_output`` behind the
  write of the step's own keys, in every step that isn't replayed as one graph; query [tokens, heads, head size]
- ``get_forward_context().slot_mapping``: by layer, where in its cache each token of the batch is written
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention

from comb.backbones.attention_calls import grouped_scores
from comb_serving.linking.methods import LinkMethod
from comb_serving.vllm.linking.links import Blocks, LookCommand

_SCORES = 2**25  # numbers of a layer that are there at once, in float32


class QueryLooks:
    """The attention that this rank's heads pay.

    Shapes: S tokens of a question, H query heads in G groups, D channels, K tokens up to a question's last.

    Args:
        slots: of a layer's cache, (name, blocks, start, end) -> [end - start].
        keys: in it, (name, slots [K]) -> [K, G, D].

    Raises ValueError for a model whose attention isn't queries times keys.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        slots: Callable[[str, Blocks, int, int], Tensor],
        keys: Callable[[str, Tensor], Tensor],
    ) -> None:
        odd = next((type(layer).__name__ for layer in layers.values() if type(layer) is not Attention), None)
        if odd is not None:
            raise ValueError(
                f"focus chooses by what the question looks at, which can't be seen in vLLM's {odd}: use "
                "--method primed, or legolink:16"
            )
        self.layers, self._slots, self._keys = dict(layers), slots, keys
        self.wanted: Sequence[LookCommand] = ()
        self._paid: dict[str, Tensor] = {}
        self._places: dict[LookCommand, int] = {}
        self._heard = 0
        for name, layer in self.layers.items():
            layer.impl.forward = partial(self._hear, name, layer.impl.forward)  # on this object alone

    def close(self) -> None:
        """Nothing is heard any more."""
        for layer in self.layers.values():
            del layer.impl.forward

    def listen(self, looks: Sequence[LookCommand], looking: Collection[str]) -> None:
        """Before a step: of these rows of it; `looking` are all requests that have begun and not ended."""
        self.wanted, self._heard = looks, 0
        self._places.clear()
        if looks:
            self._paid = {name: paid for name, paid in self._paid.items() if name in looking}

    def chosen(self) -> dict[str, list[int]]:
        """After it: by request, which of its document tokens are computed again, where that can be told now.

        Raises RuntimeError if a layer was not heard: then this isn't the vLLM that the hook was written for.
        """
        looks, self.wanted = self.wanted, ()
        if self._heard != len(looks) * len(self.layers):
            raise RuntimeError(
                f"{len(looks)} questions were computed in {len(self.layers)} layers, and {self._heard} calls of "
                "attention heard"
            )
        found = {}
        for look in looks:
            if look.end == look.length:  # the question's last tokens
                paid = tensor_model_parallel_all_reduce(self._paid.pop(look.name)).cpu()
                found[look.name] = LinkMethod.parse(look.method).recomputed(look.spans, paid) or []
        return found

    def _hear(
        self, name: str, forward: Callable[..., Any], layer: Any, query: Tensor, *given: Any, **named: Any
    ) -> Any:
        output = forward(layer, query, *given, **named)
        for look in self.wanted:
            if look not in self._places:  # the same in all layers; a GPU is waited for
                (own,) = self._slots(name, look.blocks, look.start, look.start + 1)
                self._places[look] = int((get_forward_context().slot_mapping[name] == own).nonzero()[0])
            at = self._places[look]
            rows = query[at : at + look.end - look.start]
            keys = self._keys(name, self._slots(name, look.blocks, 0, look.end))
            if look.name not in self._paid:
                self._paid[look.name] = torch.zeros(look.length, device=query.device)
            self._paid[look.name][: look.end] += attention_paid(
                rows, keys, look.start, layer.impl.scale, layer.sliding_window
            )
            self._heard += 1
        return output


def attention_paid(query: Tensor, keys: Tensor, start: int, scale: float, window: int | None) -> Tensor:
    """The attention that a question's tokens pay to each token [K], float32: added up over tokens and heads.

    Args:
        query: [S, H, D], at positions from `start` on. keys: [K, G, D], at positions from 0 on.
        window: tokens that each sees, itself among them; None: all up to itself.
    """
    paid, places = torch.zeros(len(keys), device=keys.device), torch.arange(len(keys), device=keys.device)
    keys = keys.float().transpose(0, 1)[None]
    for part in places[start:].split(max(1, _SCORES // (query.shape[1] * len(places)))):  # the question's own places
        own, rows = part[:, None], query[part - start].transpose(0, 1)[None]
        seen = places <= own if window is None else (places <= own) & (places > own - window)
        paid += grouped_scores(rows, keys, scale, seen[None, None]).softmax(-1).sum(dim=(0, 1, 2, 3))
    return paid
