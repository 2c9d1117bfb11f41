"""Reads a comb checkpoint's configuration the way vLLM wants it: the backbone's own, with the adapter's beside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.transformers_utils.config import HFConfigParser, get_config_parser, register_config_parser

from comb.backbones.loading import backbone_beside, resolve_name
from comb.model.config import CombConfig, CombEncoderConfig
from comb_serving.vllm import PREFIX

FORMAT = "hf"
ATTRIBUTE = "comb"


class CombConfigParser(HFConfigParser):
    """vLLM's parser of config.json; a comb checkpoint becomes its backbone's configuration as vLLM itself reads it.

    So everything that vLLM derives from a configuration (rope, head sizes, kinds of layers, quantisation) holds, and
    only the architecture's name has ``Comb`` in front. The adapter's part is the dictionary ``config.comb``.
    """

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """As vLLM's. Raises ValueError if the backbone's folder now holds another model than the adapter's."""
        read, config = super().parse(model, trust_remote_code, revision, code_revision, **kwargs)
        if not isinstance(config, CombConfig):
            return read, config
        if not config.backbone_name_or_path:
            raise ValueError(
                f"{model} doesn't name its backbone: set backbone_name_or_path in its config.json to the backbone's "
                "Hub id or folder"
            )
        source = resolve_name(backbone_beside(config.backbone_name_or_path, model))
        read, backbone = super().parse(source, trust_remote_code, config.backbone_revision, **kwargs)
        trained, found = config.get_text_config(), backbone.get_text_config()
        for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
            ours, theirs = getattr(trained, name, None), getattr(found, name, None)
            if ours != theirs:
                raise ValueError(
                    f"the adapter was trained on a backbone with {name} {ours}, {source} has {theirs}: "
                    "point backbone_name_or_path in the adapter's config.json to the backbone it belongs to"
                )
        names = backbone.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[backbone.model_type]]
        backbone.architectures = [PREFIX + name for name in names]
        assert isinstance(config.encoder_config, CombEncoderConfig)
        of_adapter = {
            "backbone": source,
            "revision": config.backbone_revision,
            "layers": list(config.cross_attention_layers or []),
            "encoder": config.encoder_config.to_diff_dict(),
            "lora_rank": config.lora_rank,
            "fingerprint": config.backbone_fingerprint,
        }
        setattr(backbone, ATTRIBUTE, of_adapter)
        return read, backbone


def register_parser() -> None:
    """Puts `CombConfigParser` in the place of vLLM's own parser of config.json, which it extends."""
    if isinstance(get_config_parser(FORMAT), CombConfigParser):
        return
    log = logging.getLogger("vllm.transformers_utils.config")
    before = log.level
    log.setLevel(logging.ERROR)  # vLLM warns that the format is taken: here that is the point
    try:
        register_config_parser(FORMAT)(CombConfigParser)
    finally:
        log.setLevel(before)


def encoder_config(config: PreTrainedConfig) -> CombEncoderConfig:
    """The shape of the cross blocks, from a configuration that `CombConfigParser` made."""
    return CombEncoderConfig(**getattr(config, ATTRIBUTE)["encoder"])
