"""The form of a fresh adapter: what makes keys and values of a document, and what of the decoder reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from transformers import PreTrainedModel

from comb.backbones.discovery import BackboneInfo, UnsupportedBackboneError
from comb.backbones.primer import Primer, own_tokenizer, primer_ids
from comb.backbones.rotary import primer_limit
from comb.model.encoder import Rotary
from comb.model.initialization import encoder_config_for
from comb.model.joint_attention import check_turning

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncoderForm:
    """Options of `CombForCausalLM.from_backbone`, which says what they mean; the defaults are the paper's form."""

    shared_layers: bool = False
    joint_attention: bool = False
    primer: Primer = False
    key_distance: int = 0
    cross_mlp: bool = True
    gate: float = 0.0

    def with_options(self, given: Mapping[str, Any]) -> Self:
        """This form, but for what is given.

        Raises:
            ValueError: for options that make no sense, or not together.
        """
        form = replace(self, **given)
        if not 0 <= form.gate < 1:
            raise ValueError(f"gate is a share, 0 <= gate < 1, not {form.gate}")
        if form.joint_attention and form.gate:
            raise ValueError("joint_attention has no gates to open: leave gate out")
        return form


PAPER = EncoderForm()
"""Layers of the encoder's own, and cross blocks behind closed gates."""

JOINT = EncoderForm(shared_layers=True, joint_attention=True, primer=True)
"""What learned most on a real model (docs/experiments.md): a fresh adapter of it is the method `primed`."""

BLOCKS = EncoderForm(shared_layers=True, key_distance=32, cross_mlp=False, gate=0.95)
"""The best with cross blocks, for backbones whose layers can't read documents at their places."""


def default_form(backbone: PreTrainedModel, info: BackboneInfo, given: Mapping[str, Any]) -> EncoderForm:
    """`JOINT` where it is asked for, or can be and `given` has nothing that only cross blocks have; else `BLOCKS`.

    Raises:
        ValueError: as `EncoderForm.with_options`.
    """
    joint = given.get("joint_attention")
    if joint is None:
        of_blocks = given.keys() & {"key_distance", "cross_mlp", "gate"}
        reason = "" if of_blocks else why_not_joint(backbone, info)
        if reason:
            logger.warning("cross blocks read documents, not the layers themselves: %s", reason)
        joint = not of_blocks and not reason
    if not joint:
        return BLOCKS.with_options(given)
    form = JOINT.with_options(given)
    return form if "primer" in given else replace(form, primer=_passage(backbone))


def why_not_joint(backbone: PreTrainedModel, info: BackboneInfo) -> str:
    """Why joint attention isn't the default for a backbone; empty where it is.

    It was trained, and is served, where all layers attend to all of a prompt. For others it has to be asked for.
    """
    if info.latent_attention:
        return "the backbone's attention is latent"
    other = next((kind for kind in info.layer_kinds if kind != "full"), None)
    if other is not None:
        return f"some layers are {other}"
    config = encoder_config_for(backbone, info, num_layers=1, causal=True, max_document_tokens=None, plain=True)
    try:
        check_turning(backbone, range(info.num_layers), Rotary(config))
    except UnsupportedBackboneError as error:
        return str(error)
    return ""


def _passage(backbone: PreTrainedModel) -> Primer:
    """The primer's token ids; False where no tokenizer is beside the backbone's weights."""
    if backbone.get_input_embeddings().weight.is_meta:  # sizes without weights, which a primer doesn't change
        return False
    try:
        return primer_ids(True, own_tokenizer(backbone), primer_limit(backbone.config))
    except ValueError as error:
        logger.warning("documents are compiled without a primer: %s", error)
        return False
