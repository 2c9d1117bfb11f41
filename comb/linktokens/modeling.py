"""A frozen backbone with trained link tokens: documents are compiled behind them, nothing is recomputed at link time.

Legend: B rows, T tokens of the longest row, n link tokens, P link tokens in front of all documents of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache

from comb.backbones.discovery import UnsupportedBackboneError
from comb.backbones.forward import cache_argument
from comb.backbones.identity import exclusive, weights_fingerprint
from comb.backbones.rotary import why_length_dependent
from comb.linking.cache import plain_layer
from comb.linking.masks import FRESH, PADDING, for_attention, visible
from comb.linking.positions import UnmovableError
from comb.linking.support import LinkSupport, find_support
from comb.linktokens.front import LearnedFront, LinkTokensConfig, key_values
from comb.model.adapter import AdapterModel, device_of, floating, frozen_backbone, of_backbone


class LinkTokensForCausalLM(AdapterModel, GenerationMixin):
    """Link tokens on a backbone, which is the plain backbone, bit for bit, wherever no document is compiled.

    Args:
        config: what the adapter looks like.
        backbone: a loaded causal language model; made from `config.backbone_config` with random weights if None.
    """

    config_class = LinkTokensConfig

    def __init__(self, config: LinkTokensConfig, backbone: PreTrainedModel | None = None) -> None:
        if backbone is None:
            backbone = AutoModelForCausalLM.from_config(config.backbone_config)
        if config._attn_implementation is None:
            config._attn_implementation = backbone.config._attn_implementation
        super().__init__(config)
        self.backbone = backbone.requires_grad_(False)
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
            find_support(backbone)
        except UnmovableError as reason:
            raise UnsupportedBackboneError(f"link tokens can't be put on this backbone: {reason}") from reason
        count = len(token_ids or ()) or 8 if num_link_tokens is None else num_link_tokens
        with exclusive(backbone):
            seen = key_values(backbone, [0])
        shapes = [[len(keys), keys.shape[-1], values.shape[-1]] for keys, values in seen]
        config = LinkTokensConfig(
            **of_backbone(name_or_model, backbone, revision), num_link_tokens=count, layer_shapes=shapes
        )
        model = cls(config, backbone)
        model._place(adapter_dtype or floating(backbone.dtype)).eval()
        model.start_from([model.placeholder_id] * count if token_ids is None else token_ids)
        return model

    def start_from(self, token_ids: Sequence[int]) -> None:
        """Makes the link tokens what these tokens are at the start of a prompt. Raises ValueError unless they are n."""
        if len(token_ids) != self.num_link_tokens:
            raise ValueError(f"expected {self.num_link_tokens} tokens, one for each link token, got {len(token_ids)}")
        with exclusive(self.backbone):
            for number, (keys, values) in enumerate(key_values(self.backbone, token_ids)):
                self.front.keys[number].copy_(keys)
                self.front.values[number].copy_(values)

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
        first token of a prompt that begins with a document: here it is compiled, there recomputed.

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
        support = self.trainable_support()
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

    def trainable_support(self) -> LinkSupport:
        """How the backbone is linked in whole rows. Raises ValueError where it can't be; the message says why."""
        try:
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
