"""vLLM's options for linking, and what it can't be combined with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comb.backbones.adapter import same_embedding
from comb.backbones.loading import load_config
from comb.backbones.rotary import front_limit
from comb.backbones.tokenizer import front_ids, load_tokenizer
from comb.linktokens.front import LinkTokensConfig
from comb.methods.fronts import dummy_ids
from comb_serving.config.serve_options import ServeOptions
from comb_serving.linking.methods import LinkMethod
from comb_serving.vllm.fixed_weights import check_no_transfer

SCHEDULER = "comb_serving.vllm.linking.scheduler.make_scheduler"
WORKER = "comb_serving.vllm.linking.pool_worker.LinkingWorker"

FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")  # caches of vLLM's where a scale of the layer times a byte is a number
LEAST_TOKENS = 8  # in a step: interiors are never computed token by token


def engine_options(method: LinkMethod, front: Sequence[int] = (), link_tokens: str | None = None) -> dict[str, Any]:
    """Arguments of vLLM's engine; without vLLM installed they can be had too.

    `front`: token ids that documents are compiled behind; `link_tokens`: the adapter that gives their keys and values.
    """
    transfer = {
        "kv_connector": "LinkingConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "comb_serving.vllm.linking.connector",
        "kv_connector_extra_config": {"method": method.name, "front": list(front), "link_tokens": link_tokens},
    }  # fmt: skip
    options = {"kv_transfer_config": transfer, "scheduler_cls": SCHEDULER, "worker_cls": WORKER}
    if method.states:
        # with it vLLM keeps states at the ends of blocks, where linked ones would be found by plain prompts
        return {**options, "enable_prefix_caching": False}
    # layers with a sliding window keep all tokens beside those without: seams attend to blocks that would be gone
    return {**options, "disable_hybrid_kv_cache_manager": True}


def linking_options(options: ServeOptions) -> dict[str, Any]:
    """`engine_options` of a server for a plain model, or an adapter with link tokens; none where it links nothing."""
    chosen, links = LinkMethod.parse(options.method or "full"), options.link_tokens
    return {} if chosen.full else engine_options(chosen, front_for(chosen, options.checkpoint, links), links)


def front_for(method: LinkMethod, checkpoint: str | Path, link_tokens: str | None = None) -> list[int]:
    """What a method's documents are compiled behind, in a checkpoint's tokens; placeholders for an adapter's.

    Raises ValueError for a checkpoint without a tokenizer, or without BOS and EOS where those stand there.
    """
    if link_tokens is not None:
        adapter = load_config(link_tokens, LinkTokensConfig)
        return [adapter.placeholder_id] * adapter.num_link_tokens
    if method.front == "none":
        return []
    config = load_config(checkpoint)
    if method.front == "prose":
        return front_ids("prose", load_tokenizer(checkpoint), front_limit(config))
    return dummy_ids(method.front, config.get_text_config(decoder=True))


def method_of(vllm_config: Any) -> LinkMethod:
    """The method that an engine was started with."""
    return LinkMethod.parse(vllm_config.kv_transfer_config.get_from_extra_config("method", "naive"))


def front_of(vllm_config: Any) -> list[int]:
    """What its documents are compiled behind."""
    return list(vllm_config.kv_transfer_config.get_from_extra_config("front", []))


def link_tokens_of(vllm_config: Any) -> str | None:
    """The adapter that gives keys and values of the front; None where the model computes them."""
    found: str | None = vllm_config.kv_transfer_config.get_from_extra_config("link_tokens", None)
    return found


def check_engine(vllm_config: Any) -> None:
    """Raises ValueError for what linked documents don't work with."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):  # fmt: skip
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"documents are linked with {name} 1, not {getattr(parallel, name)}")
    if parallel.enable_dbo:
        raise ValueError("documents are linked without enable_dbo: halves of a batch would not see each other's seams")
    if vllm_config.speculative_config is not None:
        raise ValueError("documents are linked without speculative decoding, which has not been tried with them")
    if not cache.cache_dtype.startswith(("auto", "float", "bfloat")):
        odd = " beside latent or linear attention" * bool(model.use_mla or method_of(vllm_config).states)
        if cache.cache_dtype not in FP8 or odd:
            raise ValueError(
                "documents are linked in a KV cache of the model's own dtype or in fp8, not with kv_cache_dtype "
                f"{cache.cache_dtype}{odd}: leave it at auto"
            )
    if model.is_encoder_decoder or model.is_multimodal_model or model.runner_type != "generate":
        raise ValueError(
            "documents are linked in models that generate text from text alone, not in ones that also see: use "
            "--method full, or the library, which links in these models' text part"
        )
    if vllm_config.lora_config is not None and (link_tokens_of(vllm_config) or method_of(vllm_config).states):
        raise ValueError(
            "documents are linked beside LoRA by methods of attention layers without an adapter's link tokens: those "
            "were trained without LoRA, and hypic has not been tried with any"
        )
    if model.enable_sleep_mode:
        raise ValueError("documents are linked without sleep mode: the pool would not sleep with the cache")
    check_no_transfer(vllm_config)
    if method_of(vllm_config).states:
        check_states(vllm_config)


def check_backbone(model: Any, config: LinkTokensConfig) -> None:
    """Raises ValueError if vLLM's model isn't the backbone of an adapter, by what this rank has of its embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    table = next((module for module in model.modules() if isinstance(module, VocabParallelEmbedding)), None)
    if table is None or config.backbone_fingerprint is None:
        return
    first, end = table.shard_indices.org_vocab_start_index, table.shard_indices.org_vocab_end_index
    if not same_embedding(table.weight[: end - first], config.backbone_fingerprint, first):
        raise ValueError(
            f"these link tokens belong to {config.backbone_name_or_path}, and the model's embedding is another one"
        )


def check_states(vllm_config: Any) -> None:
    """Raises ValueError for what the states of linear layers aren't linked with."""
    if vllm_config.cache_config.enable_prefix_caching or vllm_config.cache_config.mamba_cache_mode != "none":
        raise ValueError("hypic links states without vLLM's prefix cache: leave --enable-prefix-caching away")
    if link_tokens_of(vllm_config) and vllm_config.parallel_config.tensor_parallel_size > 1:
        raise ValueError(
            "states that link tokens have learned aren't divided among ranks: leave --tensor-parallel-size away, or "
            "serve the backbone with --method hypic:8,front=prose"
        )
    if (tokens := vllm_config.scheduler_config.max_num_batched_tokens) < LEAST_TOKENS:
        raise ValueError(f"hypic links states with max_num_batched_tokens of at least {LEAST_TOKENS}, not {tokens}")


def check_groups(kv_cache_config: Any, method: LinkMethod) -> None:
    """Raises ValueError unless every layer keeps keys and values of all tokens; with linear layers, or one state."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    linked = (FullAttentionSpec, MLAAttentionSpec, *([MambaSpec] if method.states else []))
    odd = ", ".join(sorted({type(spec).__name__ for spec in specs if not isinstance(spec, linked)}))
    if odd and method.states:
        raise ValueError(f"hypic links full attention and linear layers, not {odd}: use --method full")
    if odd:
        raise ValueError(
            f"documents are linked in models whose layers all keep the whole prompt, not with {odd}: "
            "behind a sliding window, or in a recurrent state, there is nothing to write them to; use --method full"
        )
    if len(specs) > 1 and not method.states:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ValueError(f"documents are linked in models with one kind of KV cache, not {kinds}")
