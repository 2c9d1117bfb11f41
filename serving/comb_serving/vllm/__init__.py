"""The vLLM plug-in: `vllm serve` and `vllm.LLM` take a comb checkpoint as it is (docs/serving.md).

`register` is vLLM's entry point; it runs in every process of an instance and imports no model code.
"""

from __future__ import annotations

PREFIX = "Comb"
OP = "comb_cross_block"


def register() -> None:
    """Makes comb checkpoints and their architectures known to vLLM; calling it again changes nothing."""
    import vllm

    from comb_serving.vllm.versions import check_version, cut_graphs_at

    check_version(vllm.__version__)

    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from comb_serving.vllm.checkpoint import register_parser
    from comb_serving.vllm.setup import config_hook

    register_parser()
    for name in list(ModelRegistry.get_supported_archs()):
        served = PREFIX + name
        if name.startswith(PREFIX) or served in MODELS_CONFIG_MAP:
            continue
        ModelRegistry.register_model(served, f"comb_serving.vllm.models:{served}")
        MODELS_CONFIG_MAP[served] = config_hook(MODELS_CONFIG_MAP.get(name))
    # documents differ between two replays of one CUDA graph, so graphs are cut at the op as they are at attention
    cut_graphs_at(f"vllm::{OP}")
