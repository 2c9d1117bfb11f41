"""Joint reading: linked documents are further keys and values of the decoder layers' own attention.

COMB's cross blocks (`comb.model.cross_attention`) give documents a softmax of their own, in front of the layer, and no
places. In a prompt, a layer shares one softmax between documents and all else,

    softmax([q K_documents^T, q K_own^T] / sqrt(D)) [V_documents, V_own]

and each token has a place, which rotary embeddings turn its queries and keys by. Both is done here: a document's keys
are turned to where it stands in the prompt, tokens behind it stand as much further back as if it were there, and those
in front of it don't see it. So nothing is trained on the decoder's side, documents are heard from the start, and what
stands in front of all documents is what it is without them.

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
from transformers import DynamicCache, PreTrainedModel

from comb.backbones.attention_calls import ANSWERING, Attended, AttentionCall, attention, stand_in
from comb.backbones.discovery import ATTENTION_NAMES, UnsupportedBackboneError, find_child
from comb.backbones.forward import decoder_of, run_decoder, takes_positions
from comb.backbones.rotary import why_length_dependent
from comb.backbones.transformers_private import attention_name, can_set_attention
from comb.model.cross_attention import KeyValues, LinkedDocuments
from comb.model.encoder import Rotary, apply_rotary
from comb.waits import on_device

_NEVER = 2**62


class PlacedDocuments(LinkedDocuments):
    """`LinkedDocuments` at their places in the prompt.

    Args:
        rows: as of `LinkedDocuments`; keys are turned by their places in their documents.
        behind: for each document, how many of its row's own tokens stand in front of it, in ascending order.
        turning: cosines and sines [rows, tokens, rotary_dim] of places [rows, tokens], without a factor.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[KeyValues]],
        behind: Sequence[Sequence[int]],
        turning: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(rows, None)
        self.visible: Tensor | None = None
        """Which of the documents' keys the tokens of this pass see, None for all. [rows with documents, N, K] bool"""
        self.key_mask = None  # padding is among what no token sees
        self._front = max(place for row in behind for place in row)
        most = max(map(len, rows))
        after, tokens = torch.full((len(rows), most), _NEVER), torch.zeros(len(rows), most, dtype=torch.long)
        starts = torch.zeros(len(self.with_documents), self.lengths.longest)
        seen_from = torch.full((len(self.with_documents), self.lengths.longest), _NEVER)
        for row, (documents, own) in enumerate(zip(rows, behind, strict=True)):
            end = 0
            for number, ((keys, _), front) in enumerate(zip(documents, own, strict=True)):
                here = self.with_documents.index(row), slice(end, end + keys.shape[1])
                starts[here], seen_from[here] = front + end, front
                after[row, number], tokens[row, number] = front, keys.shape[1]
                end += keys.shape[1]
        self._after, self._tokens, self._seen_from = (
            on_device(each, self.device) for each in (after, tokens, seen_from)
        )
        turn = turning(on_device(starts, self.device))
        self.keys = tuple(apply_rotary(keys.float(), *turn).to(keys) for keys in self.keys)

    def place(self, positions: Tensor, start: int) -> Tensor:
        """Where the tokens of a pass stand that are `positions` among their row's own ones, both [..., B, N].

        Args:
            start: tokens that are in the cache.
        """
        own = positions[0] if positions.ndim == 3 else positions
        repeats, device = len(own) // self.num_rows, own.device
        after, tokens = (each.to(device).repeat_interleave(repeats, 0) for each in (self._after, self._tokens))
        if own.shape == (1, 1) and start >= self._front:  # it decodes
            self.visible = None
        else:
            rows = self.rows_of(len(own))
            readers = own if rows is None else own.index_select(0, rows.to(device))
            seen_from = self._seen_from.to(device).repeat_interleave(repeats, 0)
            self.visible = readers[..., None] >= seen_from[:, None]
        moved: Tensor = positions + ((own[..., None] >= after[:, None]) * tokens[:, None]).sum(-1)
        return moved


class JointReading:
    """Answers the attention calls of chosen layers of a backbone, only while someone needs it.

    Like `comb.backbones.hooks.LayerHooks`: the first `attached()` has the backbone's attention asked for, the last
    one to leave takes that back. Calls of threads that have nothing linked are the plain ones, bit for bit.

    Args:
        attentions: of the layers that read documents, in order.
        linked: what this thread reads now, None for nothing.
    """

    def __init__(
        self, backbone: PreTrainedModel, attentions: Sequence[nn.Module], linked: Callable[[], PlacedDocuments | None]
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
                hook = decoder_of(self._backbone).register_forward_pre_hook(self._place, with_kwargs=True)
                self._asked.callback(hook.remove)
        token = ANSWERING.set(self)
        try:
            yield
        finally:
            ANSWERING.reset(token)
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._asked.close()

    def _place(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """In front of a pass through the decoder: its tokens are told their places."""
        link = self._linked()
        if link is None:
            return None
        given = kwargs.get("input_ids", args[0] if args else None)
        given = kwargs["inputs_embeds"] if given is None else given
        past, positions = kwargs.get("past_key_values"), kwargs.get("position_ids")
        start = 0 if past is None else int(past.get_seq_length())
        mask = kwargs.get("attention_mask")
        if positions is None and isinstance(mask, Tensor) and mask.ndim == 2:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, start:]  # padding on the left is no token
        if positions is None:
            positions = torch.arange(start, start + given.shape[1], device=given.device)[None]
        if positions.shape[-2] < len(given):
            positions = positions.expand(*positions.shape[:-2], len(given), -1)
        placed = link.place(positions, start)
        if not takes_positions(self._backbone):
            return None
        kwargs = {**kwargs, "position_ids": placed}
        if not start and mask is None:
            # without a mask, transformers takes a step in the places for the beginning of another text
            kwargs["attention_mask"] = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
        return args, kwargs

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


def _beside(link: PlacedDocuments, layer: int, call: AttentionCall) -> AttentionCall:
    """The call with the documents' keys and values in front of its own; each of its rows has documents."""
    _, keys, values, _ = link.attention_inputs(layer, call.query)
    if keys.shape[1] != call.keys.shape[1] or keys.shape[3] != call.keys.shape[3]:
        raise ValueError(
            f"joint attention: the layer has {call.keys.shape[1]} key heads of {call.keys.shape[3]}, the adapter "
            f"{keys.shape[1]} of {keys.shape[3]}; choose other cross_attention_layers"
        )
    mask = _mask(call, link.visible, keys.shape[2])
    keys = torch.cat((keys.to(call.keys), call.keys), 2)
    return replace(call, keys=keys, values=torch.cat((values.to(call.values), call.values), 2), mask=mask)


def _mask(call: AttentionCall, visible: Tensor | None, tokens: int) -> Tensor | None:
    """The call's mask [B or 1, 1, N, L] with columns for documents in front, in its own form; None: all is visible.

    visible: as of `PlacedDocuments`. tokens: K
    """
    own, (queries, length), device = call.mask, (call.query.shape[2], call.keys.shape[2]), call.query.device
    if visible is None:
        if own is None:
            return None
        visible = torch.ones(1, 1, 1, dtype=torch.bool, device=device).expand(len(own), queries, tokens)
    if own is None:
        own = torch.ones(1, 1, queries, length, dtype=torch.bool, device=device).tril(length - queries)
    documents = visible.to(device)[:, None].expand(-1, own.shape[1], -1, -1)
    if own.dtype != torch.bool:
        shut = torch.finfo(own.dtype).min
        documents = torch.zeros(documents.shape, dtype=own.dtype, device=own.device).masked_fill(~documents, shut)
    return torch.cat((documents, own.expand(len(visible), -1, -1, -1)), -1)


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


def layers_with_attention(layers: nn.ModuleList) -> list[int]:
    """Indices of the layers that have softmax attention."""
    return [index for index, layer in enumerate(layers) if find_child(layer, ATTENTION_NAMES) is not None]


@torch.no_grad()
def check_turning(backbone: PreTrainedModel, chosen: Sequence[int], rotary: Rotary) -> None:
    """Raises UnsupportedBackboneError if a chosen layer turns its keys otherwise than `rotary` does, or none is chosen.

    Asked of the layers themselves: a token alone sees nothing but itself, so its keys differ by its place only.
    """
    if not chosen or not can_set_attention(backbone):
        raise UnsupportedBackboneError(
            f"no layer of {type(backbone).__name__} calls softmax attention in a way that lets it read documents: use "
            "cross blocks (joint_attention: false)"
        )
    if reason := why_length_dependent(backbone):
        raise UnsupportedBackboneError(
            f"joint attention turns keys once, and of {type(backbone).__name__} {reason}: use cross blocks "
            "(joint_attention: false)"
        )
    table = backbone.get_input_embeddings().weight
    if table.is_meta:  # nothing can be run; whoever trains it has weights
        return
    cache, places = DynamicCache(config=backbone.config), torch.tensor([[0], [7]], device=table.device)
    run_decoder(backbone, torch.full((2, 1), 5), cache, position_ids=places if takes_positions(backbone) else None)
    turn = rotary.turning(places[1:])
    for layer in chosen:
        first, later = cache.layers[layer].keys.float().split(1)
        wanted = apply_rotary(first, *(each.to(first.device) for each in turn))
        if (later - wanted).norm() > 0.05 * (later - first).norm().clamp_min(1e-3 * first.norm()):
            raise UnsupportedBackboneError(
                f"joint attention turns keys by halves with one set of frequencies, and layer {layer} of "
                f"{type(backbone).__name__} gives its keys their places otherwise: leave it out of "
                "cross_attention_layers, or use cross blocks (joint_attention: false)"
            )
