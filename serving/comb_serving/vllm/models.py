"""``Comb<architecture>`` for each decoder that vLLM serves: its class with cross blocks, made when first asked for."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import ModelRegistry

from comb.backbones.adapter import same_embedding
from comb.backbones.discovery import MLP_NAMES, decoder_layers
from comb.backbones.torch_private import is_plain
from comb.model.lora import merge
from comb_serving.vllm import PREFIX
from comb_serving.vllm.block import GATE_UP, PagedCrossBlock, checkpoint_weights, load_weight
from comb_serving.vllm.checkpoint import ATTRIBUTE, encoder_config
from comb_serving.vllm.decoder_pool import capability_of
from comb_serving.vllm.rows import RequestDocuments

if TYPE_CHECKING:  # what it is mixed into is any of vLLM's model classes
    from vllm.model_executor.models.llama import LlamaForCausalLM as ModelClass
else:
    ModelClass = object

BACKBONE = "comb_backbone."  # in front of names from the backbone's folder
BLOCKS, ENCODER = "cross_blocks.", "encoder."
MATRIX = re.compile(rf"layers\.(\d+)\.(?:{'|'.join(MLP_NAMES)})\.(gate_up_proj|gate_proj|up_proj|down_proj)\.weight$")
"""Of a decoder layer's MLP, beside which a cross block's may have LoRA."""


class CombMixin(ModelClass):
    """Comes first among the bases of ``Comb<architecture>``; everything else is the backbone's class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
        model_config = vllm_config.model_config
        adapter = getattr(model_config.hf_config, ATTRIBUTE)
        self.comb = RequestDocuments(capability_of)
        self.comb_config = encoder_config(model_config.hf_config)
        self._comb_vllm_config = vllm_config
        self.comb_blocks: dict[str, PagedCrossBlock] = {}
        # read after the checkpoint itself, which holds the adapter
        self.secondary_weights = [DefaultModelLoader.Source(adapter["backbone"], adapter["revision"], prefix=BACKBONE)]
        layers = decoder_layers(self, model_config.hf_text_config.num_hidden_layers)
        known = vllm_config.compilation_config.static_forward_context
        self.comb.blocks = len(adapter["layers"])
        for index, layer in enumerate(adapter["layers"]):
            block = PagedCrossBlock(self.comb_config, index, self.comb, f"{prefix}comb.{index}")
            known[block.name] = self.comb_blocks[f"{BLOCKS}{index}."] = block
            put_in_front(layers[layer], block)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The backbone's weights go through its own loader, the adapter's into the cross blocks; no encoder here.

        Raises:
            ValueError: if the checkpoint lacks a weight of the cross blocks, one is not finite, or the backbone's
                embedding isn't the one that the adapter was trained on.
        """
        model_config = self._comb_vllm_config.model_config
        adapter = getattr(model_config.hf_config, ATTRIBUTE)
        place, fingerprint = self.secondary_weights[-1].model_or_path, adapter["fingerprint"]
        missing = {  # what the cross blocks still wait for: name in the checkpoint -> parameter, part of it
            start + name: (weight, part)
            for start, block in self.comb_blocks.items()
            for name, weight, part in checkpoint_weights(block)
        }
        ours = {id(weight) for weight, _ in missing.values()}
        lora: dict[str, Tensor] = {}  # stands beside what the backbone's weights bring, which come afterwards
        same: list[bool] = []  # of weights with the embedding's shape, as names differ: whether it is the adapter's
        factor = getattr(model_config.hf_text_config, "residual_multiplier", None) or 1

        def take(name: str, tensor: Tensor) -> None:
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"adapter weight {name} holds NaN or infinity: the checkpoint is damaged")
            if name not in missing:
                raise ValueError(f"{place} has two matrices that {name} could have LoRA beside: serve it merged")
            weight, part = missing.pop(name)
            load_weight(weight, tensor, part)

        def of_backbone() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in missing:
                    take(name, tensor)
                elif f"{name.partition('.lora_')[0]}.weight" in missing:
                    lora[name] = tensor
                elif name.startswith(BACKBONE):
                    if fingerprint is not None and list(tensor.shape) == fingerprint["embedding_shape"]:
                        same.append(same_embedding(tensor, fingerprint))
                    for path, base in copied_matrices(name, tensor, adapter["layers"]):
                        down, up = (lora.get(f"{path}.lora_{which}.weight") for which in "AB")
                        if down is None or up is None or base.shape != (len(up), down.shape[1]) or not is_plain(base):
                            continue
                        if factor != 1 and path.endswith("down_proj"):
                            base = base.float() * factor
                        base = base.to(model_config.dtype)
                        take(f"{path}.weight", merge(path, base, down, up, adapter["lora_rank"]))
                    yield name.removeprefix(BACKBONE), tensor
                elif not name.startswith(ENCODER):
                    raise ValueError(f"the checkpoint has a weight {name!r} that belongs to no part of this adapter")

        names = set(super().load_weights(of_backbone()))
        if missing:
            beside = f", beside which there is LoRA, and which {place} hasn't got as such" if lora else ""
            such = f"weights of its cross blocks, such as {list(missing)[:3]}{beside}"
            raise ValueError(f"the checkpoint lacks {len(missing)} {such}")
        if same and not any(same):
            raise ValueError(f"the embedding in {place} differs from the one that this adapter was trained on")
        return names | {name for name, weight in self.named_parameters() if id(weight) in ours}

    def get_model_state_cls(self) -> type:
        """For vLLM's V2 model runner: the backbone's model state, which also knows documents."""
        from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

        from comb_serving.vllm.gpu_worker import with_documents

        own = getattr(super(), "get_model_state_cls", None)
        if own is not None:
            return with_documents(own())
        plain: Any = types.SimpleNamespace(modules=self.modules)  # the model without this method
        return with_documents(resolve_model_state_cls(self._comb_vllm_config, plain))


def copied_matrices(name: str, tensor: Tensor, layers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Of a weight of the backbone's, the matrices that those of cross blocks in front of `layers` are copies of, by the
    names of these without ``.weight`` (`comb.model.lora.copied`)."""
    found = MATRIX.search(name)
    if found is None or int(found[1]) not in layers:
        return
    start = f"{BLOCKS}{layers.index(int(found[1]))}.mlp."
    if found[2] == "gate_up_proj":
        yield from zip((start + part for part in GATE_UP), tensor.chunk(2), strict=True)
    else:
        yield start + found[2], tensor


def put_in_front(layer: nn.Module, block: nn.Module) -> None:
    """The layer's input passes through `block` first. Names of the layer's own parameters stay as they are.

    Raises:
        ValueError: for a layer that takes no `hidden_states`.
    """
    # looked up once here, not at each call: torch.compile traces hooks
    names = list(inspect.signature(layer.forward).parameters)
    if "hidden_states" not in names:
        kind = type(layer).__name__
        raise ValueError(f"{kind} can't get a cross block: its forward takes {names}, not hidden_states")
    hidden_at = names.index("hidden_states")
    residual_at = names.index("residual") if "residual" in names else len(names)

    def mix(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        residual = args[residual_at] if residual_at < len(args) else kwargs.get("residual")
        if hidden_at < len(args):
            hidden, _ = layer.comb(args[hidden_at], residual)
            return (*args[:hidden_at], hidden, *args[hidden_at + 1 :]), kwargs
        hidden, _ = layer.comb(kwargs["hidden_states"], residual)
        return args, {**kwargs, "hidden_states": hidden}

    layer.add_module("comb", block)
    layer.register_forward_pre_hook(mix, with_kwargs=True)


def __getattr__(name: str) -> Any:
    backbone = ModelRegistry.models.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if backbone is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(name, (CombMixin, backbone.load_model_cls()), {"__module__": __name__})
    globals()[name] = made
    return made
