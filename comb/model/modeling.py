"""A frozen backbone with an encoder plugged in: COMB for any Hugging Face causal language model."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from comb.backbones.adapter import backbone_fingerprint
from comb.backbones.discovery import BackboneInfo, inspect_backbone
from comb.backbones.identity import bit_sums, identity_of, settings_of
from comb.cache.picache import CrossPICache
from comb.model.config import CombConfig, CombEncoderConfig
from comb.model.cross_attention import CrossBlock, KeyValues, LayerHooks, LinkedDocuments
from comb.model.encoder import CombEncoder
from comb.model.pretrained import CombPreTrainedModel
from comb.model.segments import (
    Documents,
    Segment,
    check_rows,
    checked_rows,
    equal_parts,
    padded_batches,
    token_ids_of,
)
from comb.waits import on_device

ENCODE_BATCH_TOKENS = 16_384

# per thread or task: what is linked to which model, the innermost last, and which models have their encoder off
_linked: ContextVar[tuple[tuple[Any, LinkedDocuments], ...]] = ContextVar("comb_linked", default=())
_disabled: ContextVar[tuple[Any, ...]] = ContextVar("comb_disabled", default=())


_COMPILED = (
    "torch.compile on the whole model ignores hooks that come later: set "
    "torch._dynamo.config.skip_nnmodule_hook_guards = False before compiling, or compile the decoder layers one by one"
)


class CombForCausalLM(CombPreTrainedModel, GenerationMixin):
    """COMB: documents are encoded once, alone; the frozen backbone reads them through gated cross blocks.

    Without documents, or with the encoder disabled, it is the plain backbone, bit for bit: cross blocks hang on
    the decoder layers as hooks only while documents are linked.

    Args:
        config: what the adapter looks like.
        backbone: a loaded causal language model; made from `config.backbone_config` with random weights if None.
    """

    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["EncoderLayer", "CrossBlock"]

    def __init__(self, config: CombConfig, backbone: PreTrainedModel | None = None) -> None:
        if backbone is None:
            backbone = AutoModelForCausalLM.from_config(config.backbone_config)
        if config._attn_implementation is None:
            config._attn_implementation = backbone.config._attn_implementation
        super().__init__(config)
        self.backbone = backbone.requires_grad_(False)
        self.info: BackboneInfo = inspect_backbone(backbone)
        encoder_config: CombEncoderConfig = config.encoder_config  # type: ignore[assignment]  # a dict only before init
        encoder_config._attn_implementation = config._attn_implementation
        layers: list[int] = config.cross_attention_layers or []
        if layers and layers[-1] >= self.info.num_layers:
            raise ValueError(f"cross_attention_layers {layers} exceed the backbone's {self.info.num_layers} layers")
        self.encoder = CombEncoder(encoder_config, config.cross_encoder_layers or [])
        self.cross_blocks = nn.ModuleList(CrossBlock(encoder_config, index) for index in range(len(layers)))
        functions: dict[int, Callable[[Tensor], Tensor]] = {
            layer: functools.partial(self._cross, block) for layer, block in zip(layers, self.cross_blocks, strict=True)
        }
        self._hooks = LayerHooks(backbone.get_submodule(self.info.layers_path), functions)
        self._kept_fingerprint: str | None = None
        self.agree_on_passes: Callable[[int, int], int] | None = None
        """``agree(passes wanted, most possible) -> passes`` of the encoder per training batch, for runs whose ranks
        must call the same modules (ZeRO-3 gathers weights at each call); None: as many as suit this rank."""

    # --- compile -------------------------------------------------------------------------------------------

    @property
    def num_cross_layers(self) -> int:
        """Decoder layers that read documents, and key and value tensors in a PICache."""
        return len(self.encoder.key_value_heads)

    @property
    def max_document_tokens(self) -> int:
        """The longest document the encoder takes, in tokens."""
        return int(self.config.encoder_config.max_position_embeddings)

    @torch.no_grad()
    def encode(self, segments: Sequence[Segment]) -> list[CrossPICache]:
        """Compiles segments (token ids), each on its own. Returns one PICache per segment, in order.

        Raises:
            ValueError: for an empty segment, one longer than `max_document_tokens`, or unknown token ids.
        """
        was_training = self.encoder.training
        self.encoder.eval()
        try:
            encoded = self._encode([token_ids_of(segment) for segment in segments])
        finally:
            self.encoder.train(was_training)
        # clones: a slice of the padded batch would keep the whole batch in memory
        return [CrossPICache(self.fingerprint, k.clone(), v.clone()) for k, v in encoded]

    def _encode(self, segments: list[tuple[int, ...]]) -> list[KeyValues]:
        """Keys and values per segment; the same segment twice is encoded once."""
        unique = sorted(set(segments), key=len)
        for segment in unique:
            self._check_segment(segment)
        encoded: dict[tuple[int, ...], KeyValues] = {}
        batches = list(padded_batches(unique, ENCODE_BATCH_TOKENS))
        if self.agree_on_passes is not None and torch.is_grad_enabled():
            batches = equal_parts(unique, self.agree_on_passes(len(batches), len(unique)))
        for batch in batches:
            encoded.update(zip(batch, self.encode_batch(batch), strict=True))
        return [encoded[segment] for segment in segments]

    def encode_batch(self, segments: list[tuple[int, ...]]) -> list[KeyValues]:
        """Keys and values per segment, all in one pass; with gradients where they are enabled."""
        return self.encoder.encode(self._embed(segments))

    def _embed(self, segments: list[tuple[int, ...]]) -> list[Tensor]:
        """[tokens, hidden] per segment, from one look into the table."""
        table = self.backbone.get_input_embeddings()
        ids = on_device(torch.tensor([token for segment in segments for token in segment]), table.weight.device)
        embedded: Tensor = table(ids[None])[0]
        if self.config.embedding_scale != 1.0:
            embedded = embedded * self.config.embedding_scale
        return list(embedded.split([len(segment) for segment in segments]))

    def _check_segment(self, segment: tuple[int, ...]) -> None:
        if not segment:
            raise ValueError("empty document: it has no tokens")
        if len(segment) > self.max_document_tokens:
            raise ValueError(
                f"a document of {len(segment)} tokens is longer than the encoder's {self.max_document_tokens}: "
                "split it into several documents"
            )
        unknown = next((token for token in segment if not 0 <= token < self.info.vocab_size), None)
        if unknown is not None:
            raise ValueError(
                f"a document holds token id {unknown}, the backbone's are 0 to {self.info.vocab_size - 1}: "
                "it was tokenised for another model"
            )

    # --- link ----------------------------------------------------------------------------------------------

    @contextmanager
    def linked(self, documents: Documents | None) -> Iterator[LinkedDocuments | None]:
        """Links documents to the rows of the batches that this thread runs inside the ``with`` block.

        Args:
            documents: one list per row, of PICaches or (to train through the encoder) token ids.

        Raises:
            ValueError: if the encoder is disabled, or a PICache was made by other weights.
        """
        rows = checked_rows(documents)
        if not any(rows):
            yield None
            return
        if not self.encoder_enabled:
            raise ValueError("documents were given while the encoder is disabled; put them into the prompt as text")
        link = LinkedDocuments(self._key_values(rows), self.config._attn_implementation)
        with _Attached(self, link):
            yield link

    def _key_values(self, rows: list[list[CrossPICache | Segment]]) -> list[list[KeyValues]]:
        segments = [token_ids_of(item) for row in rows for item in row if not isinstance(item, CrossPICache)]
        encoded = iter(self._encode(segments))
        return [
            [self._checked(item) if isinstance(item, CrossPICache) else next(encoded) for item in row] for row in rows
        ]

    def check_picache(self, picache: CrossPICache) -> None:
        """Raises ValueError if a PICache was compiled by other weights than this model's."""
        if picache.fingerprint != self.fingerprint:
            raise ValueError(
                f"this PICache was compiled by another model or adapter ({picache.fingerprint}; this one is "
                f"{self.fingerprint}): compile the document again"
            )

    def _checked(self, picache: CrossPICache) -> KeyValues:
        self.check_picache(picache)
        device = self.device
        return picache.keys.to(device), picache.values.to(device)

    def _current_link(self) -> LinkedDocuments | None:
        return next((link for model, link in reversed(_linked.get()) if model is self), None)

    def _cross(self, block: nn.Module, hidden: Tensor) -> Tensor:
        link = self._current_link()
        if link is None:
            return hidden
        link.was_read = True
        crossed: Tensor = block(hidden, link)
        return crossed

    # --- running -------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        documents: Documents | None = None,
        labels: Tensor | None = None,
        states: Sequence[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The backbone's forward over the query, with documents linked to its rows.

        Args:
            input_ids: the queries (no document text). [rows, tokens]
            documents: one list per row, of any length; None when no row has documents.
            labels, kwargs: as for the backbone.
            states: hidden states in front of the layers with cross blocks, each [rows, tokens, hidden]; in place of
                the backbone the blocks alone are run, each on its own.

        Returns:
            the backbone's output; of `states`, what each block adds to them.
        """
        check_rows(documents, input_ids, kwargs.get("inputs_embeds"), *(states or ())[:1])
        with self.linked(documents) as link:
            if states is not None:
                return [block(x, link) - x for block, x in zip(self.cross_blocks, states, strict=True)]
            output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        if link is not None:
            _check_read(link)
        return output

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        documents: Documents | None = None,
        **kwargs: Any,
    ) -> Any:
        """`GenerationMixin.generate` of the backbone, with documents linked to the rows of the prompt.

        Takes everything that transformers' `generate` takes (sampling, beams, streamers, batches padded on the
        left with an attention mask).
        """
        check_rows(documents, inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        with self.linked(documents) as link:
            if link is not None:
                given = kwargs.get("stopping_criteria") or ()
                kwargs["stopping_criteria"] = StoppingCriteriaList([*given, _ReadAtEveryStep(link)])
            return self.backbone.generate(inputs, **kwargs)

    # --- the switch ----------------------------------------------------------------------------------------

    @property
    def encoder_enabled(self) -> bool:
        """Whether this thread may link documents."""
        return not any(model is self for model in _disabled.get())

    @contextmanager
    def encoder_disabled(self) -> Iterator[None]:
        """Inside the ``with`` block, for this thread, the model is the plain backbone; giving it documents is an
        error. Requests that other threads have under way keep theirs."""
        token = _disabled.set((*_disabled.get(), self))
        try:
            yield
        finally:
            _disabled.reset(token)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """`encoder_disabled`, under PEFT's name."""
        return self.encoder_disabled()

    # --- training ------------------------------------------------------------------------------------------

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As in transformers; each recomputation sees the documents that its forward saw."""
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError("reentrant checkpointing loses the gradients of linked documents: use_reentrant=False")
        super().gradient_checkpointing_enable({**options, "context_fn": self._recompute_contexts}, **kwargs)

    def enable_input_require_grads(self) -> None:
        """Nothing to do: non-reentrant checkpointing needs no gradient at the (frozen) embeddings."""

    def _recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For one checkpointed call: nothing around its forward, and its documents linked again for its backward."""
        link = self._current_link()
        return nullcontext(), (nullcontext() if link is None else _Attached(self, link))

    # --- identity ------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Names what PICaches depend on: the backbone's embedding, and the whole encoder, their hooks too."""
        if self._kept_fingerprint is not None:
            return self._kept_fingerprint
        return str(identity_of(self).fact("fingerprint of PICaches", self._digest))

    def keep_fingerprint(self) -> None:
        """For a model that will only encode, with weights that encoding doesn't need taken away: it stays who it is."""
        self._kept_fingerprint = self.fingerprint

    def _digest(self) -> str:
        config: Any = self.encoder.config
        shape = {field.name: getattr(config, field.name) for field in fields(CombEncoderConfig)
                 if field.name in CombEncoderConfig.__annotations__}  # fmt: skip
        digest = hashlib.sha256(backbone_fingerprint(self.backbone).encode())
        # the name of the backbone is that of a few of its rows
        digest.update(repr([bit_sums(table) for table in self.get_input_embeddings().parameters()]).encode())
        digest.update(repr((sorted(shape.items()), self.encoder.sources, self.config.embedding_scale)).encode())
        digest.update((settings_of(self.encoder) + settings_of(self.get_input_embeddings())).encode())
        for parameter in self.encoder.parameters():
            digest.update(str(parameter.dtype).encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


class _Attached:
    """Documents linked to a model for this thread, its hooks on the layers. May be entered again and again."""

    def __init__(self, model: CombForCausalLM, link: LinkedDocuments) -> None:
        self._model, self._link = model, link
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._model._hooks.attached())
            token = _linked.set((*_linked.get(), (self._model, self._link)))
            stack.callback(_linked.reset, token)
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._stacks.pop().close()


def _check_read(link: LinkedDocuments) -> None:
    """Raises RuntimeError if nothing read the documents since the last check: never an answer without its document."""
    if not link.was_read:
        raise RuntimeError(f"the backbone ran without its cross blocks, so the documents were not read; {_COMPILED}")
    link.was_read = False


class _ReadAtEveryStep(StoppingCriteria):
    """Never stops; called between the steps of a generation, it checks that each of them read the documents."""

    def __init__(self, link: LinkedDocuments) -> None:
        self._link = link

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        _check_read(self._link)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


AutoModelForCausalLM.register(CombConfig, CombForCausalLM)  # AutoConfig: comb/__init__.py
