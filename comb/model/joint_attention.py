"""Joint reading: linked documents are further keys and values of the decoder layers' own attention.

COMB's cross blocks (`comb.model.cross_attention`) give documents a softmax of their own, in front of the layer. In a
prompt, a layer shares one softmax between documents and all else:

    softmax([q K_documents^T, q K_own^T] / sqrt(D)) [V_documents, V_own]

which is what is computed here, by the layer's own queries. So nothing is trained on the decoder's side, documents are
heard from the start, and those layers that don't read them are the plain backbone's.

The first token of a prompt reads no documents, unless it is the only one: it is where attention rests (StreamingLLM),
and would be another token if it had documents in front of it, which in a prompt it hasn't.

Shapes: B rows, H query heads, G key and value heads, N queries, L own keys, K keys of documents, D their size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from comb.backbones.attention_calls import ANSWERING, Attended, AttentionCall, attention, stand_in
from comb.backbones.discovery import ATTENTION_NAMES, UnsupportedBackboneError, find_child
from comb.backbones.transformers_private import attention_name
from comb.model.cross_attention import LinkedDocuments


class JointReading:
    """Answers the attention calls of chosen layers of a backbone, only while someone needs it.

    Like `comb.backbones.hooks.LayerHooks`: the first `attached()` has the backbone's attention asked for, the last
    one to leave takes that back. Calls of threads that have nothing linked are the plain ones, bit for bit.

    Args:
        attentions: of the layers that read documents, in order.
        linked: what this thread reads now, None for nothing.
    """

    def __init__(
        self, backbone: PreTrainedModel, attentions: Sequence[nn.Module], linked: Callable[[], LinkedDocuments | None]
    ) -> None:
        self._backbone, self._attentions, self._linked = backbone, list(attentions), linked
        self._lock = threading.Lock()
        self._users = 0
        self._asked = ExitStack()

    def __reduce__(self) -> tuple[Any, ...]:
        # as of LayerHooks: a lock can't be copied, and a copied model starts with nobody inside
        return JointReading, (self._backbone, self._attentions, self._linked)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, this thread's calls are answered."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._asked.enter_context(attention(self._backbone, stand_in(attention_name(self._backbone))))
        token = ANSWERING.set(self)
        try:
            yield
        finally:
            ANSWERING.reset(token)
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._asked.close()

    def attend(self, call: AttentionCall) -> Attended:
        """The call's output [B, N, H, D]; rows without documents get the plain one's, bit for bit."""
        layer = next((index for index, module in enumerate(self._attentions) if module is call.module), None)
        link = None if layer is None else self._linked()
        if layer is None or link is None:
            return call.exact()
        link.was_read = True
        rows = link.rows_of(call.query.shape[0])
        if rows is None:
            return _beside(link, layer, call).exact()
        output, weights = call.exact()
        rows = rows.to(output.device)
        mask = call.mask if call.mask is None or len(call.mask) == 1 else call.mask.index_select(0, rows)
        query, keys, values = (tensor.index_select(0, rows) for tensor in (call.query, call.keys, call.values))
        mixed, _ = _beside(link, layer, replace(call, query=query, keys=keys, values=values, mask=mask)).exact()
        return output.index_copy(0, rows, mixed), weights


def _beside(link: LinkedDocuments, layer: int, call: AttentionCall) -> AttentionCall:
    """The call with the documents' keys and values in front of its own; each of its rows has documents."""
    _, keys, values, masked = link.attention_inputs(layer, call.query)
    if keys.shape[1] != call.keys.shape[1] or keys.shape[3] != call.keys.shape[3]:
        raise ValueError(
            f"joint attention: the layer has {call.keys.shape[1]} key heads of {call.keys.shape[3]}, the adapter "
            f"{keys.shape[1]} of {keys.shape[3]}; choose other cross_attention_layers"
        )
    mask = _mask(call, masked["key_mask"], keys.shape[2])
    keys = torch.cat((keys.to(call.keys), call.keys), 2)
    return replace(call, keys=keys, values=torch.cat((values.to(call.values), call.values), 2), mask=mask)


def _mask(call: AttentionCall, there: Tensor | None, documents: int) -> Tensor | None:
    """The call's mask [B or 1, 1, N, L] with columns for documents in front, in its own form; None: all is visible.

    there: which of the documents' keys are, [B, K]; None for all.
    """
    own, (queries, length), device = call.mask, (call.query.shape[2], call.keys.shape[2]), call.query.device
    if own is None:
        if queries == 1 and there is None:
            return None
        own = torch.ones(1, 1, queries, length, dtype=torch.bool, device=device).tril(length - queries)
    visible = torch.ones(1, documents, dtype=torch.bool, device=device) if there is None else there
    visible = visible[:, None, None]
    if queries > 1:  # who sees no key but its own is the first
        seen = own if own.dtype == torch.bool else own == 0
        visible = visible & (seen.sum(-1, keepdim=True) != 1)
    rows = max(len(own), len(visible))
    visible = visible.expand(rows, own.shape[1], queries, -1)
    if own.dtype != torch.bool:
        shut = torch.finfo(own.dtype).min
        visible = torch.zeros(visible.shape, dtype=own.dtype, device=device).masked_fill(~visible, shut)
    return torch.cat((visible, own.expand(rows, -1, -1, -1)), -1)


def attention_modules(backbone: PreTrainedModel, layers: nn.ModuleList, chosen: Sequence[int]) -> list[nn.Module]:
    """The softmax attention of the chosen layers. Raises UnsupportedBackboneError where a layer has none."""
    found = []
    for index in chosen:
        module = find_child(layers[index], ATTENTION_NAMES)
        if module is None:
            raise UnsupportedBackboneError(
                f"layer {index} of {type(backbone).__name__} has no softmax attention that could read documents: leave "
                "it out of cross_attention_layers, or use cross blocks (joint_attention: false)"
            )
        found.append(module)
    return found
