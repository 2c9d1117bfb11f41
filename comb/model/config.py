"""Configuration of a COMB checkpoint: JSON beside the weights, in the form Hugging Face models use."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.configuration_utils import PretrainedConfig

from comb.backbones.adapter import AdapterConfig, check_types

FORMAT_VERSION = 3  # 1 knows no exact_prefix, and would have all tokens read; 2 no LoRA

NORM_PLACEMENTS = ("pre", "post", "sandwich")
QK_NORMS = ("none", "head", "flat")

_REMOVED = {"shared_layers": False, "sink": "token", "key_distance": 0, "cross_mlp": True,
            "joint_attention": False, "primer": None}  # fmt: skip
"""Fields of forms that were tried before version 0.2, and what they are in the form that is left (experiments.md)."""


class CombEncoderConfig(PreTrainedConfig):
    """Shape of the chunk encoder and of the cross blocks, which share its attention geometry.

    The field names are the usual ones of a Llama-style decoder; what differs from one is written here.

    Args:
        attention_bias: biases of the encoder's query, key and value projections; `attention_output_bias` of its
            output projection; `cross_attention_bias` of the cross-attention's query, key and value projections
            (None: as `attention_bias`).
        qk_norm: RMSNorm on the encoder's own queries and keys: ``none``, per ``head`` (Qwen3) or ``flat`` over
            all heads at once (OLMo-2).
        cross_qk_norm: RMSNorm on the cross-attention's queries and keys, per ``head`` (the COMB release), or ``none``:
            blocks that start as the backbone's own attention lose it where that has no such norm.
        norm_placement: ``pre`` (Llama), ``post`` (OLMo-2) or ``sandwich`` (Gemma 2) norms around each sub-layer.
        causal: a causal mask inside the encoder (the paper's eq. 2); the published code is bidirectional.
        kv_input_norm: an RMSNorm in front of each cross layer's K and V projections. The COMB release has none;
            with it the projections can start from a backbone layer's.
        max_position_embeddings: the longest document in tokens.
        front_tokens: positions of the front, learned keys and values in each layer in front of every document; 0: none.
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
    rms_norm_eps: float | int = 1e-5
    max_position_embeddings: int = 131072
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    cross_attention_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: str = "none"
    cross_qk_norm: str = "head"
    norm_placement: str = "pre"
    causal: bool = False
    kv_input_norm: bool = True
    initializer_range: float | int = 0.02
    front_tokens: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        if found := sorted(name for name, value in _REMOVED.items() if kwargs.pop(name, value) != value):
            raise ValueError(
                f"the adapter is of a form that comb doesn't have any more ({', '.join(found)}): train a front "
                "(configs/front.yaml), which leaves less of the divergence, or ask it with the version that made it"
            )
        check_types(self)
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm is one of {', '.join(QK_NORMS)}, not {self.qk_norm!r}")
        if self.cross_qk_norm not in ("head", "none"):
            raise ValueError(f"cross_qk_norm is head or none, not {self.cross_qk_norm!r}")
        if self.norm_placement not in NORM_PLACEMENTS:
            raise ValueError(f"norm_placement is one of {', '.join(NORM_PLACEMENTS)}, not {self.norm_placement!r}")
        if self.front_tokens < 0:
            raise ValueError(f"front_tokens is at least 0, not {self.front_tokens}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        super().__post_init__(**kwargs)

    @property
    def sink_tokens(self) -> int:
        """Keys of a document that are none of its tokens': one where there is a front."""
        return 1 if self.front_tokens else 0

    @property
    def cross_bias(self) -> bool:
        """Whether the cross-attention's query, key and value projections have biases."""
        return self.attention_bias if self.cross_attention_bias is None else self.cross_attention_bias


class CombConfig(AdapterConfig):
    """An encoder and its cross blocks, and the backbone they belong to (the fields of `AdapterConfig`).

    Args:
        encoder_config: shape of the encoder and the cross blocks.
        cross_attention_layers: indices of the backbone layers that have a cross block in front of them.
        cross_encoder_layers: for each cross block, the encoder layer whose output it reads.
        embedding_scale: factor between the embedding table's output and the first layer's input.
        exact_prefix: what stands in front of the documents (a system prompt, examples) reads none of them, so that it
            is computed once for all of them, as any prefix is. The COMB release reads from the first token on.
        copied_layers: the backbone's layer that each of the encoder's began as; None where they began at random.
        lora_rank: the files hold LoRA of this rank beside what was copied instead of it (`comb.model.lora`); None: all.
    """

    model_type = "comb"
    method = "comb"
    parts = ("encoder", "cross_blocks")
    otherwise = "not a COMB adapter; to put an encoder on it, use CombForCausalLM.from_backbone"
    sub_configs: ClassVar[dict[str, type[PretrainedConfig]]] = {
        **AdapterConfig.sub_configs,
        "encoder_config": CombEncoderConfig,
    }

    encoder_config: dict[str, Any] | PreTrainedConfig | None = None
    cross_attention_layers: list[int] | None = None
    cross_encoder_layers: list[int] | None = None
    embedding_scale: float | int = 1.0
    exact_prefix: bool = False
    copied_layers: list[int] | None = None
    lora_rank: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self)
        encoder: Any = self.encoder_config
        if not isinstance(encoder, PreTrainedConfig):
            encoder = CombEncoderConfig(**(encoder or {}))
        self.encoder_config, depth = encoder, encoder.num_hidden_layers
        layers = self.cross_attention_layers = list(self.cross_attention_layers or [])
        if self.cross_encoder_layers is None:
            self.cross_encoder_layers = spread_encoder_layers(depth, len(layers))
        sources, copied = self.cross_encoder_layers, self.copied_layers
        if sorted(set(layers)) != layers or any(layer < 0 for layer in layers):
            raise ValueError(f"cross_attention_layers must ascend from 0 on without repeats, got {layers}")
        if len(sources) != len(layers) or any(not 0 <= source < depth for source in sources):
            raise ValueError(
                f"cross_encoder_layers must name one of the {depth} encoder layers for each of the {len(layers)} "
                f"cross blocks, got {sources}"
            )
        if (copied is not None and len(copied) != depth) or (copied is None and self.lora_rank is not None):
            raise ValueError(
                f"copied_layers must name a layer of the backbone for each of the {depth} encoder layers, got {copied}"
            )
        super().__post_init__(**kwargs)


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
