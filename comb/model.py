"""A frozen backbone with an encoder plugged in: COMB for any Hugging Face causal language model."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from comb.adapter import backbone_beside, load_adapter, load_backbone
from comb.attach import LayerHooks
from comb.backbone import BackboneInfo, inspect_backbone
from comb.compatibility import tokenizer_fingerprint
from comb.config import CombConfig, CombEncoderConfig, spread_cross_layers
from comb.cross_attention import CrossBlock, KeyValues, LinkedDocuments
from comb.encoder import CombEncoder
from comb.fingerprint import backbone_fingerprint, check_fingerprint, fingerprint
from comb.initialization import encoder_config_for, initialize_from_backbone, initialize_random
from comb.picache import CrossPICache

logger = logging.getLogger(__name__)

Segment = Sequence[int] | Tensor
Documents = Sequence[Sequence[CrossPICache | Segment]]

ENCODE_BATCH_TOKENS = 16_384

# what is linked in this thread or task, per model: (model, documents) pairs, the innermost last
_linked: ContextVar[tuple[tuple[Any, LinkedDocuments], ...]] = ContextVar("comb_linked", default=())


class CombForCausalLM(PreTrainedModel, GenerationMixin):
    """COMB: documents are encoded once, alone; the frozen backbone reads them through gated cross blocks.

    Without documents, or with the encoder disabled, it is the plain backbone, bit for bit: cross blocks hang on
    the decoder layers as hooks only while documents are linked.

    Args:
        config: what the adapter looks like.
        backbone: a loaded causal language model; made from `config.backbone_config` with random weights if None.
    """

    config_class = CombConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["EncoderLayer", "CrossBlock"]

    def __init__(self, config: CombConfig, backbone: PreTrainedModel | None = None) -> None:
        if backbone is None:
            backbone = AutoModelForCausalLM.from_config(config.backbone_config)
        if config._attn_implementation is None:
            config._attn_implementation = backbone.config._attn_implementation
        super().__init__(config)
        self.backbone = backbone.requires_grad_(False)
        self.generation_config = backbone.generation_config
        self.info: BackboneInfo = inspect_backbone(backbone)
        encoder_config: CombEncoderConfig = config.encoder_config  # type: ignore[assignment]
        encoder_config._attn_implementation = config._attn_implementation
        layers: list[int] = config.cross_attention_layers or []
        if layers and layers[-1] >= self.info.num_layers:
            raise ValueError(f"cross_attention_layers {layers} exceed the backbone's {self.info.num_layers} layers")
        self.encoder = CombEncoder(encoder_config, config.cross_encoder_layers or [])
        self.cross_blocks = nn.ModuleList(CrossBlock(encoder_config, index) for index in range(len(layers)))
        decoder = backbone.get_submodule(self.info.layers_path)
        self._hooks = LayerHooks(
            decoder,
            {
                layer: functools.partial(self._cross, block)
                for layer, block in zip(layers, self.cross_blocks, strict=True)
            },
        )
        self._disabled_by: set[object] = set()
        self._fingerprint: tuple[tuple[int, ...], str] | None = None

    # --- making, loading, saving ---------------------------------------------------------------------------

    @classmethod
    def from_backbone(
        cls,
        name_or_model: str | Path | PreTrainedModel,
        *,
        num_encoder_layers: int = 8,
        cross_attention_layers: Sequence[int] | None = None,
        encoder_causal: bool = False,
        max_document_tokens: int | None = None,
        initialization: str = "backbone",
        adapter_dtype: torch.dtype | None = None,
        revision: str | None = None,
        **loading: Any,
    ) -> CombForCausalLM:
        """A fresh adapter on a backbone; its gates are zero, so it answers as the plain backbone does.

        Args:
            name_or_model: Hub id, folder or registered name of a causal language model, or a loaded one.
            num_encoder_layers: depth of the encoder.
            cross_attention_layers: backbone layers that get a cross block in front of them; by default as many
                as the encoder has layers (at most one per backbone layer), evenly spaced.
            encoder_causal: a causal mask inside the encoder instead of a bidirectional one.
            max_document_tokens: longest document; the backbone's context length by default.
            initialization: ``backbone`` starts encoder and blocks from the backbone's layers, ``random`` does not.
            adapter_dtype: dtype of encoder and blocks; the backbone's by default.
            revision, loading: passed to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            UnsupportedBackboneError: if no encoder can be attached to this model.
        """
        if initialization not in ("backbone", "random"):
            raise ValueError(f"initialization is 'backbone' or 'random', not {initialization!r}")
        if num_encoder_layers < 1:
            raise ValueError(f"num_encoder_layers must be at least 1, got {num_encoder_layers}")
        backbone = load_backbone(name_or_model, revision=revision, **loading)
        info = inspect_backbone(backbone)
        if cross_attention_layers is None:
            cross_attention_layers = spread_cross_layers(info.num_layers, min(num_encoder_layers, info.num_layers))
        config = CombConfig(
            backbone_name_or_path=_name_of(name_or_model, backbone),
            backbone_revision=revision,
            # a copy: setting an attention implementation on a configuration reaches into its sub-configurations
            backbone_config=copy.deepcopy(backbone.config),
            backbone_fingerprint=fingerprint(backbone),
            encoder_config=encoder_config_for(
                backbone, info, num_layers=num_encoder_layers, causal=encoder_causal,
                max_document_tokens=max_document_tokens, plain=initialization == "random",
            ),
            cross_attention_layers=sorted(int(layer) for layer in cross_attention_layers),
            embedding_scale=info.embedding_scale,
        )  # fmt: skip
        model: CombForCausalLM = cls(config, backbone)
        adapter = (model.encoder, model.cross_blocks)
        std = float(getattr(backbone.config.get_text_config(), "initializer_range", None) or 0.02)
        initialize_random(adapter, std=std, depth=num_encoder_layers)
        if initialization == "backbone":
            initialize_from_backbone(
                model.encoder, model.cross_blocks, config.cross_attention_layers, backbone, info  # type: ignore[arg-type]
            )  # fmt: skip
        model._place(adapter_dtype).eval()
        return model

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *model_args: Any,
        backbone: str | Path | PreTrainedModel | None = None,
        config: CombConfig | None = None,
        adapter_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> CombForCausalLM:
        """Loads an adapter folder (or Hub id) and the backbone it belongs to.

        Args:
            backbone: a loaded backbone, or where to load it from, instead of the one named in the checkpoint.
            kwargs: hub arguments (`revision`, `token`, `cache_dir`, ...) for the adapter; everything else
                (`dtype`, `device_map`, `attn_implementation`, ...) is for loading the backbone.

        Raises:
            ValueError: if the backbone isn't the adapter's, or the adapter's weights are missing or not finite.
        """
        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        revision = kwargs.pop("revision", None)
        if config is None:
            config = CombConfig.from_pretrained(name_or_path, revision=revision, **hub)
        if "attn_implementation" in kwargs:
            config._attn_implementation = kwargs["attn_implementation"]
        wanted = backbone_beside(config.backbone_name_or_path, name_or_path) if backbone is None else backbone
        loaded = load_backbone(wanted, revision=config.backbone_revision if backbone is None else None, **kwargs)
        if config.backbone_fingerprint is not None:
            check_fingerprint(loaded, config.backbone_fingerprint, config.backbone_name_or_path)
        model: CombForCausalLM = cls(config, loaded, *model_args)
        load_adapter(model, name_or_path, revision=revision, **hub)
        model._place(adapter_dtype).eval()
        return model

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        tokenizer: Any = None,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the adapter alone: config, trained parameters, generation config and a model card.

        Args:
            tokenizer: written beside it; its fingerprint goes into the configuration, so that another tokenizer
                is noticed when the adapter is used.
            state_dict, kwargs: as in transformers.
        """
        from comb.hub import write_card  # the card needs rendering, which loading a model does not

        if tokenizer is not None:
            self.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
            tokenizer.save_pretrained(save_directory)
        # our names are the format: conversions that transformers knows for the backbone's weights don't apply
        kwargs.setdefault("save_original_format", False)

        weights = self.state_dict() if state_dict is None else state_dict
        adapter = {name: tensor for name, tensor in weights.items() if not name.startswith("backbone.")}
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_card(self.config, Path(save_directory))
        super().save_pretrained(save_directory, state_dict=adapter, **kwargs)

    def _place(self, dtype: torch.dtype | None) -> CombForCausalLM:
        """Moves each part of the adapter to where the backbone needs it, and to `dtype` or the backbone's."""
        dtype = dtype or (self.backbone.dtype if self.backbone.dtype.is_floating_point else torch.float32)
        self.encoder.to(device=self.backbone.get_input_embeddings().weight.device, dtype=dtype)
        layers = self.backbone.get_submodule(self.info.layers_path)
        for index, block in zip(self.config.cross_attention_layers, self.cross_blocks, strict=True):
            device = next((p.device for p in layers[index].parameters()), self.device)
            block.to(device=device, dtype=dtype)
        return self

    # --- compile and link ----------------------------------------------------------------------------------

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
            encoded = self._encode([_ids(segment) for segment in segments])
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
        for batch in _batches(unique, ENCODE_BATCH_TOKENS):
            embeddings = [self._embed(segment) for segment in batch]
            encoded.update(zip(batch, self.encoder(embeddings), strict=True))
        return [encoded[segment] for segment in segments]

    def _embed(self, segment: tuple[int, ...]) -> Tensor:
        table = self.backbone.get_input_embeddings()
        embedded: Tensor = table(torch.tensor(segment, device=table.weight.device)[None])[0]
        return embedded * self.config.embedding_scale if self.config.embedding_scale != 1.0 else embedded

    def _check_segment(self, segment: tuple[int, ...]) -> None:
        if not segment:
            raise ValueError("empty document: it has no tokens")
        if len(segment) > self.max_document_tokens:
            raise ValueError(
                f"a document of {len(segment)} tokens is longer than the encoder's {self.max_document_tokens}: "
                "split it into several documents"
            )
        if min(segment) < 0 or max(segment) >= self.info.vocab_size:
            raise ValueError(
                f"a document holds token id {max(segment)}, the backbone's vocabulary ends at "
                f"{self.info.vocab_size - 1}: it was tokenised for another model"
            )

    def linked(self, documents: Documents | None) -> AbstractContextManager[None]:
        """Links documents to the rows of the batches that this thread runs inside the ``with`` block.

        Args:
            documents: one list per row, of PICaches or (to train through the encoder) token ids.

        Raises:
            ValueError: if the encoder is disabled, or a PICache was made by other weights.
        """
        if documents is None or not any(len(row) for row in documents):
            return nullcontext()
        if not self.encoder_enabled:
            raise ValueError("documents were given while the encoder is disabled; put them into the prompt as text")
        link = LinkedDocuments(self._key_values(documents), self.config._attn_implementation)
        return self._attached(link)

    @contextmanager
    def _attached(self, link: LinkedDocuments) -> Iterator[None]:
        with self._hooks.attached():
            token = _linked.set((*_linked.get(), (self, link)))
            try:
                yield
            finally:
                _linked.reset(token)

    def _key_values(self, documents: Documents) -> list[list[KeyValues]]:
        segments = [_ids(item) for row in documents for item in row if not isinstance(item, CrossPICache)]
        encoded = iter(self._encode(segments)) if segments else iter(())
        return [
            [self._checked(item) if isinstance(item, CrossPICache) else next(encoded) for item in row]
            for row in documents
        ]

    def _checked(self, picache: CrossPICache) -> KeyValues:
        if picache.fingerprint != self.fingerprint:
            raise ValueError(
                f"this PICache was compiled by other weights ({picache.fingerprint}, this model is "
                f"{self.fingerprint}): compile the document again with model.encode"
            )
        device = self.device
        return picache.keys.to(device), picache.values.to(device)

    def _current_link(self) -> LinkedDocuments | None:
        return next((link for model, link in reversed(_linked.get()) if model is self), None)

    def _cross(self, block: nn.Module, hidden: Tensor) -> Tensor:
        link = self._current_link()
        crossed: Tensor = hidden if link is None else block(hidden, link)
        return crossed

    # --- running -------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Documents | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The backbone's forward over the query, with documents linked to its rows.

        Args:
            input_ids: the queries (no document text). [rows, tokens]
            documents: one list per row, of any length; None when no row has documents.
            labels, kwargs: as for the backbone.

        Returns:
            the backbone's output.
        """
        self._check_rows(documents, input_ids if input_ids is not None else kwargs.get("inputs_embeds"))
        with self.linked(documents):
            return self.backbone(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)

    def generate(self, inputs: Tensor | None = None, documents: Documents | None = None, **kwargs: Any) -> Any:
        """`GenerationMixin.generate` of the backbone, with documents linked to the rows of the prompt.

        Takes everything that transformers' `generate` takes (sampling, beams, streamers, batches padded on the
        left with an attention mask).
        """
        self._check_rows(documents, inputs if inputs is not None else kwargs.get("input_ids"))
        with self.linked(documents):
            return self.backbone.generate(inputs, **kwargs)

    def _check_rows(self, documents: Documents | None, inputs: Tensor | None) -> None:
        if documents is not None and inputs is not None and len(documents) != inputs.shape[0]:
            raise ValueError(
                f"documents has {len(documents)} lists for {inputs.shape[0]} rows of input_ids: "
                "give one list (possibly empty) per row"
            )

    # --- the switch ----------------------------------------------------------------------------------------

    @property
    def encoder_enabled(self) -> bool:
        """Whether documents may be linked."""
        return not self._disabled_by

    @contextmanager
    def encoder_disabled(self) -> Iterator[None]:
        """Inside the ``with`` block the model is the plain backbone; giving it documents is an error."""
        token = object()
        self._disabled_by.add(token)
        try:
            yield
        finally:
            self._disabled_by.discard(token)

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
        return nullcontext(), (nullcontext() if link is None else self._attached(link))

    def num_trainable_parameters(self) -> tuple[int, int]:
        """(trainable, all) parameter counts."""
        trainable = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        return trainable, sum(parameter.numel() for parameter in self.parameters())

    def print_trainable_parameters(self) -> None:
        """Prints how many parameters train, as peft does."""
        trainable, total = self.num_trainable_parameters()
        share = 100 * trainable / total
        print(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {share:.4f}")  # noqa: T201

    # --- identity ------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Names the weights that PICaches depend on: backbone embedding and shapes, and the whole encoder."""
        parameters = list(self.encoder.parameters())
        versions = tuple(value for parameter in parameters for value in (parameter.data_ptr(), parameter._version))
        if self._fingerprint is None or self._fingerprint[0] != versions:
            digest = hashlib.sha256(backbone_fingerprint(self.backbone).encode())
            digest.update(self.encoder.config.to_json_string().encode())
            digest.update(repr((self.encoder.sources, self.config.embedding_scale)).encode())
            for parameter in parameters:
                digest.update(str(parameter.dtype).encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            self._fingerprint = (versions, digest.hexdigest()[:16])
        return self._fingerprint[1]

    def get_input_embeddings(self) -> nn.Module:
        """The backbone's embedding table, which the encoder shares."""
        return self.backbone.get_input_embeddings()  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Module | None:
        """The backbone's head."""
        return self.backbone.get_output_embeddings()  # type: ignore[no-any-return]

    def _init_weights(self, module: nn.Module) -> None:
        pass  # encoder and blocks are initialised by from_backbone, or loaded


HUB_ARGUMENTS = ("token", "cache_dir", "force_download", "local_files_only", "subfolder", "proxies")


def _name_of(name_or_model: str | Path | PreTrainedModel, backbone: PreTrainedModel) -> str:
    return str(backbone.config._name_or_path) if isinstance(name_or_model, PreTrainedModel) else str(name_or_model)


def _ids(segment: Segment) -> tuple[int, ...]:
    return tuple(segment.tolist()) if isinstance(segment, Tensor) else tuple(segment)


def _batches(segments: list[tuple[int, ...]], budget: int) -> Iterator[list[tuple[int, ...]]]:
    """Runs of segments (sorted by length) whose padded size stays under `budget` tokens."""
    batch: list[tuple[int, ...]] = []
    for segment in segments:
        if batch and (len(batch) + 1) * len(segment) > budget:
            yield batch
            batch = []
        batch.append(segment)
    if batch:
        yield batch


AutoConfig.register("comb", CombConfig)
AutoModelForCausalLM.register(CombConfig, CombForCausalLM)
