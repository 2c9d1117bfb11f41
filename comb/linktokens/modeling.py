"""A frozen backbone with trained link tokens: documents are compiled behind them, nothing is recomputed at link time.

Legend: B rows, T tokens of the longest row, n link tokens, P link tokens in front of all documents of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache

from comb.backbones.discovery import UnsupportedBackboneError
from comb.backbones.forward import cache_argument, decoder_of
from comb.backbones.identity import exclusive, weights_fingerprint
from comb.backbones.rotary import why_length_dependent
from comb.hybrid.caches import is_hybrid, new_cache, run
from comb.hybrid.compile import compile_segment
from comb.hybrid.link import link_segments
from comb.hybrid.picache import HybridPICache
from comb.hybrid.support import HybridSupport, find_hybrid_support
from comb.linking.cache import plain_layer
from comb.linking.masks import FRESH, PADDING, for_attention, visible
from comb.linking.positions import UnmovableError
from comb.linking.support import LinkSupport, find_support
from comb.linktokens.front import FrontTensors, LearnedFront, LinkTokensConfig
from comb.model.adapter import AdapterModel, device_of, floating, frozen_backbone, of_backbone

HYBRID_SEAM = 8
"""Tokens at a document's ends that are computed again where states are linked, also in training; `hypic`'s default."""


class LinkTokensForCausalLM(AdapterModel, GenerationMixin):
    """Link tokens on a backbone, which is the plain backbone, bit for bit, wherever no document is compiled.

    Args:
        config: what the adapter looks like.
        backbone: a loaded causal language model; made from `config.backbone_config` with random weights if None.
    """

    config_class = LinkTokensConfig

    def __init__(self, config: LinkTokensConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config, backbone)
        self.front = LearnedFront(config)

    @classmethod
    def from_backbone(
        cls,
        name_or_model: str | Path | PreTrainedModel,
        *,
        num_link_tokens: int | None = None,
        token_ids: Sequence[int] | None = None,
        adapter_dtype: torch.dtype | None = None,
        revision: str | None = None,
        **loading: Any,
    ) -> Self:
        """Fresh link tokens on a backbone.

        Args:
            name_or_model: Hub id, folder or registered name of a causal language model, or a loaded one.
            num_link_tokens: n, in front of every document; by default as many as `token_ids`, or 8.
            token_ids: n tokens of the backbone that they start as, those in front of documents in its prompts, say; by
                default its BOS token (or EOS, or 0).
            adapter_dtype: dtype of what is learned; the backbone's by default.
            revision, loading: passed to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            UnsupportedBackboneError: for a model that is an adapter already, or whose keys and values can't be linked.
            ValueError: for options that make no sense, or loading options beside a loaded model.
        """
        backbone = frozen_backbone(name_or_model, revision=revision, **loading)
        try:
            if not is_hybrid(backbone):
                find_support(backbone)
            elif find_hybrid_support(backbone).step is not None:
                raise UnmovableError("its scans can't start from a state")
        except UnmovableError as reason:
            raise UnsupportedBackboneError(f"link tokens can't be put on this backbone: {reason}") from reason
        count = len(token_ids or ()) or 8 if num_link_tokens is None else num_link_tokens
        with exclusive(backbone):
            seen = FrontTensors.of(backbone, token_ids or [0])
        model = cls(seen.config(count, **of_backbone(name_or_model, backbone, revision)), backbone)
        model._place(adapter_dtype or floating(backbone.dtype)).eval()
        model.start_from([model.placeholder_id] * count if token_ids is None else token_ids)
        return model

    def start_from(self, token_ids: Sequence[int]) -> None:
        """Makes the link tokens what these tokens are at the start of a prompt. Raises ValueError unless they are n."""
        if len(token_ids) != self.num_link_tokens:
            raise ValueError(f"expected {self.num_link_tokens} tokens, one for each link token, got {len(token_ids)}")
        with exclusive(self.backbone):
            seen = FrontTensors.of(self.backbone, token_ids)
            for number, (keys, values) in enumerate(seen.key_values):
                self.front.keys[number].copy_(keys)
                self.front.values[number].copy_(values)
            for name, tensor in seen.states.items():
                self.front.states[name].copy_(tensor / self.front.units[name])

    @property
    def num_link_tokens(self) -> int:
        """n, in front of every document."""
        return int(self.config.num_link_tokens)

    @property
    def placeholder_id(self) -> int:
        return int(self.config.placeholder_id)

    @property
    def max_document_tokens(self) -> int:
        """Documents take what the backbone's positions give."""
        return int(self.config.get_text_config().max_position_embeddings) - 1 - self.num_link_tokens

    @property
    def fingerprint(self) -> str:
        """Names what documents are compiled with: the backbone's weights and the link tokens."""
        return f"{weights_fingerprint(self.backbone)}+{self.front.fingerprint}"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        linked: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The backbone's forward; with `segments`, over rows whose documents are linked behind their link tokens.

        A document's tokens see the link tokens and their document, all other tokens everything in front of them.
        Positions are those of the linked prompt. It is what method ``linktokens`` computes, with gradients, but for the
        first token of a prompt that begins with a document: here it is compiled, there recomputed. Rows of a hybrid are
        compiled and linked one by one, and have logits behind their last document alone.

        Args:
            input_ids: [B, T]; link tokens aren't among them.
            segments: [B, T], `FRESH` for tokens outside of documents, 1, 2, ... for those of a document, `PADDING`.
            linked: False leaves documents and link tokens out: what the backbone says without them at fresh tokens.
            kwargs: as for the backbone.

        Raises:
            ValueError: for a backbone that takes no mask by position, or whose positions depend on the prompt's length.
        """
        if segments is None or input_ids is None:
            return self.backbone(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if is_hybrid(self.backbone):
            return self._linked_states(input_ids, segments, linked)
        support = self.trainable_support()
        assert isinstance(support, LinkSupport)
        assert support.masks is not None
        cache, inner = None, 0
        if linked:
            rows = segments
            numbers = torch.arange(1, int(segments.max()) + 1, device=segments.device)
            n, inner = self.num_link_tokens, len(numbers) * self.num_link_tokens
            at = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
            inside = segments[:, None] == numbers[:, None]  # [B, documents, T]
            there = inside.any(-1)
            # where a document's link tokens stand: n places in front of it; anywhere in rows with fewer documents
            starts = at.gather(1, inside.int().argmax(-1)) - n
            places = (starts[:, :, None] + torch.arange(n, device=segments.device)).flatten(1)  # [B, P]
            owners = numbers.expand_as(there).masked_fill(~there, PADDING).repeat_interleave(n, dim=1)
            keys, keys_at = torch.cat([owners, segments], dim=1), torch.cat([places, at], dim=1)
            if inner:  # the link tokens' keys and values, turned to their places
                cache, copies = DynamicCache(), len(segments) * len(numbers)
                compiled_at = torch.arange(n, device=places.device).repeat(copies)
                # 1: of no matter how long a prompt
                rerotation = support.positions.rerotation(compiled_at, places.flatten(), 1, places.device)
                for pair, rotations in zip(self.front(self.backbone.dtype), support.positions.layers, strict=True):
                    turned = (
                        rerotation.apply(tensor.repeat(1, copies, 1), rotation)
                        for tensor, rotation in zip(pair, rotations, strict=True)
                    )
                    by_row = (tensor.unflatten(1, (len(segments), -1)).transpose(0, 1) for tensor in turned)
                    cache.layers.append(plain_layer(*by_row))
        else:
            fresh = segments == FRESH
            rows = keys = segments.masked_fill(~fresh, PADDING)
            at = keys_at = (fresh.cumsum(1) - 1).clamp_min(0)
        masks = {
            kind: for_attention(visible(rows, keys, at, keys_at, window, inner=inner), self.backbone)
            for kind, window in support.masks.windows
        }
        return self.backbone(
            input_ids=input_ids,
            attention_mask=masks if support.masks.mapping else next(iter(masks.values())),
            position_ids=at,
            use_cache=cache is not None,
            **{cache_argument(self.backbone): cache},
        )

    def _linked_states(self, input_ids: Tensor, segments: Tensor, linked: bool) -> Any:
        """`forward` for hybrids, whose states no mask keeps apart: what `hypic` compiles and links, with gradients."""
        backbone, rows = self.backbone, list[Tensor]()
        support = find_hybrid_support(backbone)
        begun = partial(self.front.cache, backbone, support)
        for ids, numbers in zip(input_ids.tolist(), segments.tolist(), strict=True):
            picaches, fresh, end = list[HybridPICache](), [list[int]()], 0
            for number, run_of in groupby(range(len(ids)), numbers.__getitem__):
                places = list(run_of)
                tokens = [ids[place] for place in places]
                if number == FRESH:
                    fresh[-1] += tokens
                    end = places[-1] + 1
                elif linked and number != PADDING:
                    picaches.append(
                        compile_segment(
                            backbone, support, "", tokens, seams=support.seams(HYBRID_SEAM),
                            front=[self.placeholder_id] * self.num_link_tokens, begun=begun,
                        )
                    )  # fmt: skip
                    fresh.append([])
            tail = fresh.pop()
            before = link_segments(backbone, support, picaches, [*fresh, tail[:1]])  # all but that one
            cache = new_cache(backbone) if before.cache is None else before.cache
            hidden = run(backbone, tail, cache, len(before.token_ids) - 1)
            assert hidden is not None
            rows.append(nn.functional.pad(hidden, (0, 0, end - len(tail), len(ids) - end)))
        # all of them, as DDP wants it: what the last layer starts from has no part in keys, values and states
        states = torch.stack(rows) + 0 * sum(parameter.sum() for parameter in self.front.parameters())

        def instead(module: nn.Module, args: Any, output: Any) -> Any:
            output["last_hidden_state"] = states
            return output

        # logits by the model's own head, whatever it does to them, behind a pass whose result isn't used
        handle = decoder_of(backbone).register_forward_hook(instead)
        try:
            return backbone(input_ids=input_ids[:1, :1], use_cache=False)
        finally:
            handle.remove()

    def trainable_support(self) -> LinkSupport | HybridSupport:
        """How the backbone is linked in training. Raises ValueError where it can't be; the message says why."""
        try:
            if is_hybrid(self.backbone):
                return find_hybrid_support(self.backbone)
            support = find_support(self.backbone)
            if support.masks is None:
                raise UnmovableError("it takes no mask by position")
            if reason := why_length_dependent(self.backbone):
                raise UnmovableError(reason)
        except UnmovableError as reason:
            raise ValueError(f"link tokens can't be trained on this backbone: {reason}") from reason
        return support

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The backbone's; documents take `comb.PICEngine` or method ``linktokens``."""
        return self.backbone.generate(*args, **kwargs)

    def _place(self, dtype: torch.dtype) -> Self:
        self.front.to(device=device_of(self.backbone.get_input_embeddings()), dtype=dtype)
        return self


AutoModelForCausalLM.register(LinkTokensConfig, LinkTokensForCausalLM)  # AutoConfig: comb/__init__.py
