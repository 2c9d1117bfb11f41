"""A frozen backbone with an encoder plugged in: COMB for any Hugging Face causal language model."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.modeling_layers import GradientCheckpointingLayer

from comb.backbones.adapter import backbone_fingerprint
from comb.backbones.discovery import BackboneInfo, inspect_backbone
from comb.backbones.identity import bit_sums, identity_of, settings_of
from comb.backbones.rotary import front_limit
from comb.backbones.tokenizer import check_front, front_ids, own_tokenizer
from comb.cache.picache import CrossPICache
from comb.model.adapter import AdapterModel, device_of, floating, frozen_backbone, of_backbone
from comb.model.config import CombConfig, CombEncoderConfig, spread_cross_layers
from comb.model.cross_attention import CrossBlock, KeyValues, LayerHooks, LinkedDocuments
from comb.model.encoder import CombEncoder, equal_parts, padded_batches
from comb.model.initialization import encoder_config_for, initialize_from_backbone, initialize_random, sources_of_layers
from comb.model.lora import merged
from comb.waits import on_device

Segment = Sequence[int] | Tensor
Documents = Sequence[Sequence[CrossPICache | Segment]]

INITIALIZATIONS = ("backbone", "first", "random")
DEFAULT_LAYERS = 8
"""Of an encoder, and cross blocks (COMB sec. 6)."""

ENCODE_BATCH_TOKENS = 16_384

# per thread or task: what is linked to which model, the innermost last, and which models have their encoder off
_linked: ContextVar[tuple[tuple[Any, LinkedDocuments], ...]] = ContextVar("comb_linked", default=())
_disabled: ContextVar[tuple[Any, ...]] = ContextVar("comb_disabled", default=())


class CombForCausalLM(AdapterModel, GenerationMixin):
    """COMB: documents are encoded once, alone; the frozen backbone reads them through gated cross blocks.

    Without documents, or with the encoder disabled, it is the plain backbone, bit for bit: cross blocks hang on
    the decoder layers as hooks only while documents are linked.

    Args:
        config: what the adapter looks like.
        backbone: a loaded causal language model; made from `config.backbone_config` with random weights if None.
    """

    config_class = CombConfig
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["EncoderLayer", "CrossBlock"]

    def __init__(self, config: CombConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config, backbone)
        self.info: BackboneInfo = inspect_backbone(self.backbone)
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
        self._hooks = LayerHooks(self.backbone.get_submodule(self.info.layers_path), functions)
        self._kept_fingerprint: str | None = None
        self.agree_on_passes: Callable[[int, int], int] | None = None
        """``agree(passes wanted, most possible) -> passes`` of the encoder per training batch, for runs whose ranks
        must call the same modules (ZeRO-3 gathers weights at each call); None: as many as suit this rank."""

    @classmethod
    def from_backbone(
        cls,
        name_or_model: str | Path | PreTrainedModel,
        *,
        num_encoder_layers: int | None = None,
        cross_attention_layers: Sequence[int] | None = None,
        encoder_causal: bool = False,
        exact_prefix: bool = True,
        max_document_tokens: int | None = None,
        initialization: str = "backbone",
        gate: float = 0.0,
        front: str | Sequence[int] = "none",
        adapter_dtype: torch.dtype | None = None,
        revision: str | None = None,
        **loading: Any,
    ) -> Self:
        """A fresh adapter on a backbone.

        Encoder and cross blocks start from the backbone's own layers, the gates closed: until it is trained, it answers
        as the plain backbone does.

        Args:
            name_or_model: Hub id, folder or registered name of a causal language model, or a loaded one.
            num_encoder_layers: depth of the encoder, 8 by default.
            cross_attention_layers: backbone layers with a cross block in front of them; by default as many as the
                encoder has layers, evenly spaced.
            encoder_causal: a causal mask inside the encoder instead of a bidirectional one.
            exact_prefix: tokens in front of the documents read none of them (`CombConfig`).
            max_document_tokens: longest document; the backbone's context length by default.
            initialization: ``backbone`` starts encoder and blocks from the backbone's layers, evenly spaced ones;
                ``first`` from its first ones, and each block reads the encoder layer as deep as its own, or the last: a
                causal encoder then gives the blocks up to its depth what the backbone itself has of a document alone;
                ``random`` from none.
            gate: how far the gates of cross attention are open at the start, 0 <= gate < 1.
            front: what the encoder's front starts as, behind which each document is encoded (`CombEncoder`): ``prose``,
                a passage that comb has, or a text file, for which the backbone has its tokenizer beside it; token ids;
                ``none``.
            adapter_dtype: dtype of encoder and blocks; the backbone's by default.
            revision, loading: passed to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            UnsupportedBackboneError: if no encoder can be attached to this model.
            ValueError: for options that make no sense, or loading options beside a loaded model.
        """
        if initialization not in INITIALIZATIONS:
            raise ValueError(f"initialization is {' or '.join(map(repr, INITIALIZATIONS))}, not {initialization!r}")
        for name, value in (("num_encoder_layers", num_encoder_layers), ("max_document_tokens", max_document_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        backbone = frozen_backbone(name_or_model, revision=revision, **loading)
        info = inspect_backbone(backbone)
        if not 0 <= gate < 1:
            raise ValueError(f"gate is a share, 0 <= gate < 1, not {gate}")
        if front == "none":
            behind: list[int] = []
        elif isinstance(front, str):
            behind = front_ids(front, own_tokenizer(backbone), front_limit(backbone.config))
        else:
            behind = list(front)
        check_front(behind, backbone)
        num_encoder_layers = num_encoder_layers or DEFAULT_LAYERS
        if cross_attention_layers is None:
            cross_attention_layers = spread_cross_layers(info.num_layers, min(num_encoder_layers, info.num_layers))
        if not (layers := sorted(int(layer) for layer in cross_attention_layers)):
            raise ValueError("cross_attention_layers names no layer that reads documents: give some, or leave it out")
        config = CombConfig(
            **of_backbone(name_or_model, backbone, revision),
            encoder_config=encoder_config_for(
                backbone,
                info,
                num_layers=num_encoder_layers,
                causal=encoder_causal,
                max_document_tokens=max_document_tokens,
                initialization=initialization,
                front_tokens=len(behind),
            ),
            cross_attention_layers=layers,
            cross_encoder_layers=(
                [max(0, min(layer, num_encoder_layers) - 1) for layer in layers] if initialization == "first" else None
            ),
            embedding_scale=info.embedding_scale,
            exact_prefix=exact_prefix,
            copied_layers=sources_of_layers(num_encoder_layers, info, initialization),
        )
        # where it will be: a CPU draws the 3.5 B parameters of an 8B model's adapter for minutes
        with device_of(backbone.get_input_embeddings()):
            model = cls(config, backbone)
        std = float(getattr(backbone.config.get_text_config(), "initializer_range", None) or 0.02)
        initialize_random((model.encoder, model.cross_blocks), std=std, depth=num_encoder_layers)
        if config.copied_layers is not None:
            initialize_from_backbone(model, turned=initialization == "first")
        if behind and device_of(backbone.get_input_embeddings()).type != "meta":
            model.encoder.start_front(model._embed([tuple(behind)])[0])
        for block in model.cross_blocks:
            nn.init.constant_(block.attention_gate, math.atanh(gate))  # type: ignore[arg-type]  # a parameter
        model._place(adapter_dtype or floating(backbone.dtype)).eval()
        return model

    def _whole(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        whole = merged(self, weights, dtype)
        self.config.lora_rank = None  # from here on, and where it is saved again
        return whole

    def _place(self, dtype: torch.dtype) -> Self:
        self.encoder.to(device=device_of(self.backbone.get_input_embeddings()), dtype=dtype)
        layers = self.backbone.get_submodule(self.info.layers_path)
        for index, block in zip(self.config.cross_attention_layers, self.cross_blocks, strict=True):
            block.to(device=device_of(layers[index]), dtype=dtype)
        return self

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
        encoded: dict[tuple[int, ...], KeyValues] = {}
        batches = list(padded_batches(unique, ENCODE_BATCH_TOKENS))
        if self.agree_on_passes is not None and torch.is_grad_enabled():
            batches = equal_parts(unique, self.agree_on_passes(len(batches), len(unique)))
        for batch in batches:
            encoded.update(zip(batch, self.encoder.encode(self._embed(batch)), strict=True))
        return [encoded[segment] for segment in segments]

    def _embed(self, segments: list[tuple[int, ...]]) -> list[Tensor]:
        """[tokens, hidden] per segment, from one look into the table."""
        table = self.backbone.get_input_embeddings()
        ids = on_device(torch.tensor([token for segment in segments for token in segment]), table.weight.device)
        embedded: Tensor = table(ids[None])[0]
        if self.config.embedding_scale != 1.0:
            embedded = embedded * self.config.embedding_scale
        return list(embedded.split([len(segment) for segment in segments]))

    # --- link ----------------------------------------------------------------------------------------------

    @contextmanager
    def linked(self, documents: Documents | None, reading: Tensor | None = None) -> Iterator[LinkedDocuments | None]:
        """Links documents to the rows of the batches that this thread runs inside the ``with`` block.

        Args:
            documents: one list per row, of PICaches or (to train through the encoder) token ids.
            reading: which tokens of a prompt read them; None for all. Tokens that follow one by one do. [rows, tokens]

        Raises:
            ValueError: if the encoder is disabled, or a PICache was made by other weights.
        """
        rows = checked_rows(documents)
        if not any(rows):
            yield None
            return
        if not self.encoder_enabled:
            raise ValueError("documents were given while the encoder is disabled; put them into the prompt as text")
        segments = [token_ids_of(item) for row in rows for item in row if not isinstance(item, CrossPICache)]
        encoded = iter(self._encode(segments))

        def key_values(item: CrossPICache | Segment) -> KeyValues:
            if not isinstance(item, CrossPICache):
                return next(encoded)
            self.check_picache(item)
            return item.keys.to(self.device), item.values.to(self.device)

        given = [[key_values(item) for item in row] for row in rows]
        link = LinkedDocuments(given, self.config._attn_implementation, reading)
        with _Attached(self, link):
            yield link

    def check_picache(self, picache: CrossPICache) -> None:
        """Raises ValueError if a PICache was compiled by other weights than this model's."""
        if picache.fingerprint != self.fingerprint:
            raise ValueError(
                f"this PICache was compiled by another model or adapter ({picache.fingerprint}; this one is "
                f"{self.fingerprint}): compile the document again"
            )

    def _current_link(self) -> LinkedDocuments | None:
        return next((link for model, link in reversed(_linked.get()) if model is self), None)

    def _cross(self, block: nn.Module, hidden: Tensor) -> Tensor:
        if (link := self._current_link()) is None:
            return hidden
        link.was_read = True
        return block(hidden, link)  # type: ignore[no-any-return]

    # --- running -------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        documents: Documents | None = None,
        prefix_tokens: Sequence[int] | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The backbone's forward over the query, with documents linked to its rows.

        Args:
            input_ids: the queries (no document text). [rows, tokens]
            documents: one list per row, of any length; None when no row has documents.
            prefix_tokens: per row, how many of its first tokens read none (`CombConfig.exact_prefix`); None is none.
            labels, kwargs: as for the backbone.

        Returns:
            the backbone's output.
        """
        given = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        check_rows(documents, given)
        with self.linked(documents, _reading(prefix_tokens, attention_mask, given)) as link:
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
        prefix_tokens: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`GenerationMixin.generate` of the backbone, with documents linked to the rows of the prompt.

        Takes everything that transformers' `generate` takes (sampling, beams, streamers, batches padded on the
        left with an attention mask). `prefix_tokens` is `forward`'s; not with a prompt that is taken in chunks.

        Raises:
            ValueError: for documents beside `guidance_scale`, whose pass without the prompt would read them, too, or
                `assistant_early_exit`.
        """
        prompts = inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        given = next((prompt for prompt in prompts if prompt is not None), None)
        check_rows(documents, given)
        with self.linked(documents, _reading(prefix_tokens, kwargs.get("attention_mask"), given)) as link:
            if link is not None:
                settings = kwargs.get("generation_config") or self.generation_config
                for name, off, reason in (
                    ("guidance_scale", (None, 1), "its pass without the prompt would read the documents all the same"),
                    ("assistant_early_exit", (None,), "with documents its answers are others than without it"),
                ):
                    if kwargs.get(name, getattr(settings, name, None)) not in off:
                        raise ValueError(f"{name}: {reason}; leave it out, or put them into the prompt (method full)")
                criteria = kwargs.get("stopping_criteria") or ()
                kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, _ReadAtEveryStep(link)])
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

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Where transformers turns it on and off."""
        super()._set_gradient_checkpointing(*args, **kwargs)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """As in torch, but for the frozen backbone, which is never in training."""
        super().train(mode)
        # transformers checkpoints a layer that says of itself that it trains; inside, it doesn't (`_Attached`)
        for module in self.backbone.modules():
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = mode
        return self

    def enable_input_require_grads(self) -> None:
        """Nothing to do: non-reentrant checkpointing needs no gradient at the (frozen) embeddings."""

    def _recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For one checkpointed call: a frozen layer around its forward, and around its backward its documents, too."""
        return _Attached(self, None, frozen=True), _Attached(self, self._current_link(), frozen=True)

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
        # both show in the parameters, and older adapters' names don't have them
        shape = {field.name: getattr(config, field.name) for field in fields(CombEncoderConfig)
                 if field.name in CombEncoderConfig.__annotations__
                 and field.name not in ("cross_qk_norm", "front_tokens")}  # fmt: skip
        digest = hashlib.sha256(backbone_fingerprint(self.backbone).encode())
        # the name of the backbone is that of a few of its rows
        digest.update(repr([bit_sums(table) for table in self.get_input_embeddings().parameters()]).encode())
        digest.update(repr((sorted(shape.items()), self.encoder.sources, self.config.embedding_scale)).encode())
        digest.update((settings_of(self.encoder) + settings_of(self.get_input_embeddings())).encode())
        for parameter in self.encoder.parameters():
            digest.update(str(parameter.dtype).encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def checked_rows(documents: Documents | None) -> list[list[CrossPICache | Segment]]:
    """Checks the nesting of `documents`: a list per row, of PICaches or token ids."""
    if documents is None:
        return []
    wanted = "documents takes one list per row, each of PICaches (from model.encode) or of token-id lists"
    if isinstance(documents, CrossPICache | str | Tensor):
        raise ValueError(f"{wanted}; got a single {type(documents).__name__}: write documents=[[...]]")
    for row in documents:
        if not isinstance(row, list | tuple):
            raise ValueError(f"{wanted}; got a row that is a {type(row).__name__}: write documents=[[...]]")
    return [list(row) for row in documents]


def check_rows(documents: Documents | None, given: Tensor | None) -> None:
    """Raises ValueError if there aren't as many lists of documents as rows in what is given."""
    if documents is not None and given is not None and len(checked_rows(documents)) != given.shape[0]:
        raise ValueError(
            f"documents has {len(documents)} lists for {given.shape[0]} rows of input_ids: "
            "give one list (possibly empty) per row"
        )


def _reading(prefix_tokens: Sequence[int] | None, mask: Tensor | None, given: Tensor | None) -> Tensor | None:
    """True where a prompt's tokens read documents, behind its prefix; padding on either side. [rows, tokens]"""
    if given is None or prefix_tokens is None or not any(prefix_tokens):
        return None
    rows, tokens = given.shape[:2]
    own = torch.ones(rows, tokens, dtype=torch.long, device=given.device) if mask is None else mask[:, -tokens:]
    first = on_device(torch.tensor(prefix_tokens), own.device)
    if first.shape != (rows,) or bool(((first < 0) | (first >= own.sum(-1))).any()):
        raise ValueError(
            f"prefix_tokens {list(prefix_tokens)}: one number for each of {rows} rows, less than the row has tokens "
            f"({own.sum(-1).tolist()}), as what asks about documents stands behind the prefix"
        )
    return own.cumsum(-1) > first[:, None]


def token_ids_of(segment: Segment) -> tuple[int, ...]:
    """Token ids as a tuple. Raises ValueError for anything but a flat sequence of integers."""
    ids: Any = segment.tolist() if isinstance(segment, Tensor) else segment
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(isinstance(token, int) for token in ids):
        raise ValueError(
            f"a segment is a flat list of token ids, not {type(segment).__name__} {str(segment)[:40]!r}: tokenise "
            "text first, or use PICEngine"
        )
    return tuple(ids)


class _Attached:
    """Documents linked to a model for this thread, its hooks on the layers. May be entered again and again.

    Args:
        frozen: inside, a layer of the backbone that says that it trains, so that it is checkpointed, doesn't.
    """

    def __init__(self, model: CombForCausalLM, link: LinkedDocuments | None, *, frozen: bool = False) -> None:
        self._model, self._link, self._frozen = model, link, frozen
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for module in self._model.backbone.modules() if self._frozen else ():
                if module.training:
                    stack.callback(setattr, module, "training", True)
                    module.training = False
            if self._link is not None:
                stack.enter_context(self._model._hooks.attached())
                token = _linked.set((*_linked.get(), (self._model, self._link)))
                stack.callback(_linked.reset, token)
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._stacks.pop().close()


def _check_read(link: LinkedDocuments) -> None:
    """Raises RuntimeError if nothing read the documents since the last check: never an answer without its document."""
    if not link.was_read:
        raise RuntimeError(
            "the backbone ran without its cross blocks, so the documents were not read; torch.compile on the whole "
            "model ignores hooks that come later: set torch._dynamo.config.skip_nnmodule_hook_guards = False before "
            "compiling, or compile the decoder layers one by one"
        )
    link.was_read = False


class _ReadAtEveryStep(StoppingCriteria):
    """Never stops; called between the steps of a generation, it checks that each of them read the documents, and
    counts the tokens behind the prompt."""

    def __init__(self, link: LinkedDocuments) -> None:
        self._link = link

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        _check_read(self._link)
        self._link.answered += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


AutoModelForCausalLM.register(CombConfig, CombForCausalLM)  # AutoConfig: comb/__init__.py
