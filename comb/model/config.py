"""Configuration of a COMB checkpoint: JSON beside the weights, in the form Hugging Face models use."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1

NORM_PLACEMENTS = ("pre", "post", "sandwich")
QK_NORMS = ("none", "head", "flat")
CROSS_QK_NORMS = ("head", "none")
SINKS = ("token", "null")


CONFIGURED_LATER = {"shared_layers": False, "cross_qk_norm": "head", "sink": "token"}
"""Fields of `CombEncoderConfig` that adapters of before don't have, and what they were."""


class CombEncoderConfig(PreTrainedConfig):
    """Shape of the chunk encoder and of the cross blocks, which share its attention geometry.

    The field names are the usual ones of a Llama-style decoder; what differs from one is written here.

    Args:
        attention_bias: biases of the encoder's query, key and value projections; `attention_output_bias` of its
            output projection; `cross_attention_bias` of the cross-attention's query, key and value projections
            (None: as `attention_bias`).
        qk_norm: RMSNorm on the encoder's own queries and keys: ``none``, per ``head`` (Qwen3) or ``flat`` over
            all heads at once (OLMo-2).
        norm_placement: ``pre`` (Llama), ``post`` (OLMo-2) or ``sandwich`` (Gemma 2) norms around each sub-layer.
        causal: a causal mask inside the encoder (the paper's eq. 2); the published code is bidirectional.
        kv_input_norm: an RMSNorm in front of each cross layer's K and V projections. The COMB release has none;
            with it the projections can start from a backbone layer's.
        shared_layers: the encoder has no layers of its own: a document runs through the frozen backbone's first layers,
            and the head of a cross block reads what the decoder layer behind the block is given there. Nothing but
            heads and blocks is trained or saved; compiling a document costs that share of a prefill.
        cross_qk_norm: whether cross-attention normalises queries and keys per head (``head``, COMB release) or takes
            them as they are (``none``), as the layers that it starts from do.
        sink: what a document's first token leaves in its PICache: its own keys and values like any other's (``token``,
            the COMB release), or a learned key and value that are the same for all documents (``null``). The first
            token is where a causal backbone rests its attention (StreamingLLM), with a key like no other's, which
            documents that are read side by side would repeat; the null key gives the attention that place to rest.
        max_position_embeddings: the longest document in tokens.
    """

    model_type = "comb_encoder"
    base_config_key = "encoder_config"

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 8
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    cross_attention_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: str = "none"
    norm_placement: str = "pre"
    causal: bool = False
    kv_input_norm: bool = True
    shared_layers: bool = False
    cross_qk_norm: str = "head"
    sink: str = "token"
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm is one of {', '.join(QK_NORMS)}, not {self.qk_norm!r}")
        for name, known in (
            ("norm_placement", NORM_PLACEMENTS), ("cross_qk_norm", CROSS_QK_NORMS), ("sink", SINKS)
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        super().__post_init__(**kwargs)

    @property
    def cross_bias(self) -> bool:
        """Whether the cross-attention's query, key and value projections have biases."""
        return self.attention_bias if self.cross_attention_bias is None else self.cross_attention_bias


class CombConfig(PreTrainedConfig):
    """Everything needed to attach an adapter to its backbone again.

    Args:
        backbone_name_or_path: the backbone's Hub id, registered name or folder.
        backbone_revision: commit or branch of the backbone on the Hub.
        backbone_config: the backbone's own configuration.
        backbone_fingerprint: see `comb.backbones.discovery.Fingerprint`; checked when the adapter is loaded.
        encoder_config: shape of the encoder and the cross blocks.
        cross_attention_layers: indices of the backbone layers that have a cross block in front of them.
        cross_encoder_layers: for each cross block, the encoder layer whose output it reads.
        tokenizer_fingerprint: of the tokenizer saved with the adapter; see `comb.backbones.tokenizer`.
        embedding_scale: factor between the embedding table's output and the first layer's input.
        format_version: version of this file's layout.
    """

    model_type = "comb"
    sub_configs: ClassVar[dict[str, type[PretrainedConfig]]] = {
        "backbone_config": AutoConfig,
        "encoder_config": CombEncoderConfig,
    }

    backbone_name_or_path: str = ""
    backbone_revision: str | None = None
    backbone_config: dict[str, Any] | PreTrainedConfig | None = None
    backbone_fingerprint: dict[str, Any] | None = None
    encoder_config: dict[str, Any] | PreTrainedConfig | None = None
    cross_attention_layers: list[int] | None = None
    cross_encoder_layers: list[int] | None = None
    tokenizer_fingerprint: str | None = None
    embedding_scale: float = 1.0
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.backbone_config, dict):
            self.backbone_config = _config_from_dict(self.backbone_config)
        if self.encoder_config is None:
            self.encoder_config = CombEncoderConfig()
        elif isinstance(self.encoder_config, dict):
            self.encoder_config = CombEncoderConfig(**self.encoder_config)
        self.cross_attention_layers = list(self.cross_attention_layers or [])
        if self.cross_encoder_layers is None:
            self.cross_encoder_layers = spread_encoder_layers(
                self.encoder_config.num_hidden_layers, len(self.cross_attention_layers)
            )
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        layers, sources = self.cross_attention_layers or [], self.cross_encoder_layers or []
        depth = getattr(self.encoder_config, "num_hidden_layers", 0)
        if sorted(set(layers)) != layers or any(layer < 0 for layer in layers):
            raise ValueError(f"cross_attention_layers must ascend from 0 on without repeats, got {layers}")
        if len(sources) != len(layers) or any(not 0 <= source < depth for source in sources):
            raise ValueError(
                f"cross_encoder_layers must name one of the {depth} encoder layers for each of the {len(layers)} "
                f"cross blocks, got {sources}"
            )

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """The backbone's text configuration: vocabulary, layers and context length of the decoder."""
        if isinstance(self.backbone_config, PreTrainedConfig):
            return self.backbone_config.get_text_config(*args, **kwargs)
        return self

    @property
    def hidden_size(self) -> int:
        """The backbone's, in channels; DeepSpeed's "auto" bucket sizes come from it."""
        if self.backbone_config is None:
            raise AttributeError("hidden_size")  # what hasattr() of a configuration without a backbone expects
        return int(self.get_text_config().hidden_size)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; keys that this version doesn't know are named in a warning, and kept.

        Raises:
            ValueError: if it is the configuration of another kind of model.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"this is a checkpoint of model_type {model_type!r}, not a COMB adapter; "
                "to put an encoder on it, use CombForCausalLM.from_backbone"
            )
        known = set(cls.__dataclass_fields__) | _BASE_KEYS
        unknown = sorted(key for key in config_dict if key not in known and not key.startswith("_"))
        if unknown:
            version = config_dict.get("format_version")
            logger.warning(
                "this checkpoint has configuration keys that this version of comb does not know: %s "
                "(format %s, this is %s); they have no effect: upgrade comb-pic if answers look wrong",
                ", ".join(unknown), version, FORMAT_VERSION,
            )  # fmt: skip
        return super().from_dict(config_dict, **kwargs)


_BASE_KEYS = {"model_type", "transformers_version", "torch_dtype", "auto_map", "attn_implementation", "use_cache"}


def _config_from_dict(config: dict[str, Any]) -> PreTrainedConfig | dict[str, Any]:
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("backbone_config has no model_type: it must be a whole Hugging Face config.json")
    if model_type not in CONFIG_MAPPING:  # a backbone with code of its own on the Hub: kept as it came
        return config
    return AutoConfig.for_model(**config)


def spread_cross_layers(num_backbone_layers: int, num_cross_layers: int) -> list[int]:
    """Evenly spaced backbone layers to put a cross block in front of, both ends left free: 2 of 6 -> [2, 4]."""
    if not 0 < num_cross_layers <= num_backbone_layers:
        raise ValueError(
            f"can't place {num_cross_layers} cross blocks before {num_backbone_layers} backbone layers: "
            "choose between 1 and the number of layers"
        )
    if num_cross_layers == num_backbone_layers:
        return list(range(num_backbone_layers))
    step = num_backbone_layers / (num_cross_layers + 1)
    return [round((index + 1) * step) for index in range(num_cross_layers)]


def spread_encoder_layers(num_encoder_layers: int, num_cross_layers: int) -> list[int]:
    """The encoder layer each cross block reads: its own when the counts agree (paper, Fig. 3), else evenly spread.

    The last cross block always reads the last encoder layer: 4 encoder layers, 2 cross blocks -> [1, 3];
    2 encoder layers, 4 cross blocks -> [0, 0, 1, 1].
    """
    return [max(0, -(-(index + 1) * num_encoder_layers // num_cross_layers) - 1) for index in range(num_cross_layers)]


def deepest_encoder_layers(num_encoder_layers: int, cross_layers: list[int]) -> list[int]:
    """For an encoder of the backbone's first layers: what each cross block reads, the deepest layer before its own.

    A block in front of layer 4 reads encoder layer 3, whose output is what the backbone's layer 4 is given.
    """
    return [min(num_encoder_layers - 1, max(0, layer - 1)) for layer in cross_layers]
