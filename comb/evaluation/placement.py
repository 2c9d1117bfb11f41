"""Which decoder layers carry information from documents: leave one out, and see what is lost.

In the attention of one layer, the documents of a prompt are hidden from everything that stands behind them, and the
divergence from the untouched model at the answer's tokens is measured. Where it is large, documents are read; that is
where cross blocks belong. A few layers do nearly all of it, and an even spread can miss them.

One forward pass over all prompts for each layer; nothing is trained. And how fresh cross blocks are fitted to what
documents add in the layers behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from comb.backbones.discovery import ATTENTION_NAMES, find_child, inspect_backbone, layer_input
from comb.documents.datasets import read_dataset
from comb.documents.document import Prompt, PromptBuilder
from comb.evaluation.table import FittedTable
from comb.model.encoder import padded_batches

EXAMPLES = 512
BAR = 40
MEASURED_TOKENS = 2048
"""Tokens of the prompts that `short_prompts` chooses; each goes through the backbone once per layer."""
MEASURABLE = ("full", "sliding", "both")
"""Kinds of layers (`BackboneInfo.layer_kinds`) with an attention that documents can be hidden from."""


Asked = tuple[Prompt, Sequence[int]]
"""A prompt, and the answer whose tokens are looked at."""


def short_prompts(prompts: Sequence[Asked], tokens: int = MEASURED_TOKENS) -> list[Asked]:
    """The shortest of the prompts, up to `tokens` together: where documents are read doesn't depend on their length."""
    chosen: list[Asked] = []
    total = 0
    for item in sorted(prompts, key=_tokens):
        total += _tokens(item)
        if chosen and total > tokens:
            break
        chosen.append(item)
    return chosen


def _tokens(item: Asked) -> int:
    return len(item[0].flat) + len(item[1])


@torch.no_grad()
def measure_placement(
    backbone: PreTrainedModel, prompts: Sequence[Asked], *, batch_tokens: int = 4096
) -> tuple[dict[int, float], float]:
    """By layer that has an attention, the mean divergence in nats per answer token when documents are hidden there; and
    the same without any documents, for scale.

    Args:
        prompts: with documents, and not those that the placement is scored on afterwards.
        batch_tokens: of one forward pass, padding included.

    Raises:
        ValueError: for a prompt without documents, or an attention that takes no mask (flash attention).
    """
    info = inspect_backbone(backbone)
    _check_masks(backbone, "the placement is measured", ", or name the layers")
    layers: Any = backbone.get_submodule(info.layers_path)
    chosen = {
        index: attention
        for index, kind in enumerate(info.layer_kinds)
        if kind in MEASURABLE and (attention := find_child(layers[index], ATTENTION_NAMES)) is not None
    }
    losses = dict.fromkeys(chosen, 0.0)
    without, count = 0.0, 0
    if not all(prompt.segments for prompt, _ in prompts):
        raise ValueError("a placement is measured on prompts with documents, and one has none")
    for rows in padded_batches(sorted(prompts, key=_tokens), batch_tokens, _tokens):
        batch = _Batch(rows, backbone.device)
        reference = batch.logprobs(backbone)
        count += len(reference)
        for index, attention in chosen.items():
            with hidden_in(attention, batch.hidden):
                losses[index] += _divergence(reference, batch.logprobs(backbone))
        bare = _Batch([(Prompt((), (), prompt.bare), answer) for prompt, answer in rows], backbone.device)
        without += _divergence(reference, bare.logprobs(backbone))
    return {index: loss / count for index, loss in losses.items()}, without / count


class _Batch:
    """Rows padded on the right: behind a causal mask nobody sees what is there."""

    def __init__(self, prompts: Sequence[Asked], device: torch.device) -> None:
        shape = len(prompts), max(len(prompt.flat) + len(answer) for prompt, answer in prompts)
        ids = torch.zeros(shape, dtype=torch.long)
        documents, predicts = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(prompts):
            flat = [*prompt.flat, *answer]
            ids[row, : len(flat)] = torch.tensor(flat)
            predicts[row, len(prompt.flat) - 1 : len(flat) - 1] = True
            for position, length in prompt.spans:
                documents[row, position : position + length] = True
        self.input_ids = ids.to(device)
        self.predicts = predicts.to(device)  # which tokens the answers' tokens are predicted at
        # what hiding the documents takes from the causal mask: [rows, 1, tokens, tokens]
        self.hidden = (~documents[:, :, None] & documents[:, None, :])[:, None].to(device)

    def logprobs(self, backbone: PreTrainedModel) -> Tensor:
        """Of the answers' tokens. [answer tokens, vocabulary] float32"""

        def select(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0][self.predicts][None], *args[1:])

        # in front of the head, and not by calling it: some models scale or cap what comes out
        with backbone.get_output_embeddings().register_forward_pre_hook(select):
            logits: Tensor = backbone(input_ids=self.input_ids, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


@torch.no_grad()
def fit_blocks(model: Any, prompts: Sequence[Asked], *, batch_tokens: int = 4096) -> dict[int, float]:
    """Scales each head of every cross block's attention so that together they add, as nearly as that makes it, what
    documents D add in the backbone's own attention beside the rest R of the prompt,

        Attn_l(x | D, R) - Attn_l(x | R),

    to the hidden states x in front of layer l of the tokens that an answer is predicted at: least squares. A block that
    starts as the layer's attention reads documents alone, and gives them what they share with the rest there; and
    heads that look at what is near have nothing to say of documents at all.

    Args:
        model: a fresh `CombForCausalLM` (``initialization="first"``).
        prompts: with documents, and not those that it is scored on afterwards.
        batch_tokens: of one forward pass, padding included.

    Returns:
        by layer, the share of the sum of squares that the block explains on these prompts (R2).

    Raises:
        ValueError: for an attention that takes no mask (flash attention), or isn't added as it is.
    """
    backbone, blocks = model.backbone, model.cross_blocks
    _check_masks(backbone, "cross blocks are fitted")
    if model.config.encoder_config.norm_placement != "pre" or getattr(backbone.config, "residual_multiplier", 1) != 1:
        raise ValueError(
            "initialization=first is for backbones that add the output of their attention as it is: this one has norms "
            "behind it or a factor on it"
        )
    heads, dim = model.info.num_attention_heads, model.info.head_dim
    # of each block: products of what two heads add, of that with what is wanted, and of this with itself
    sums = [[torch.zeros(heads, heads), torch.zeros(heads), torch.zeros(())] for _ in blocks]
    for rows in padded_batches(sorted(prompts, key=_tokens), batch_tokens, _tokens):
        batch = _Batch(rows, backbone.device)
        with model.linked([list(prompt.segments) for prompt, _ in rows]) as link:
            pass  # the backbone runs plainly: each block is asked about states that no other has changed
        with ExitStack() as stack:
            for place, totals in enumerate(sums):
                stack.enter_context(_compared(model, place, batch, link, totals))
            backbone.base_model(input_ids=batch.input_ids, use_cache=False)
    shares = {}
    for layer, block, (between, wanted, square) in zip(model.config.cross_attention_layers, blocks, sums, strict=True):
        ridge = 0.01 * between.diagonal().mean() * torch.eye(heads)
        scale = torch.linalg.solve(between + ridge, wanted)
        shares[layer] = float((2 * scale @ wanted - scale @ between @ scale) / square)
        gate = block.attention_gate
        opened = gate.tanh() if gate.item() else 1.0  # behind a closed gate it waits for being opened
        block.cross_attn.o_proj.weight.mul_((scale.to(gate) / opened).repeat_interleave(dim))
    return shares


@contextmanager
def _compared(model: Any, place: int, batch: _Batch, link: Any, totals: list[Tensor]) -> Iterator[None]:
    """While the backbone runs, adds up what the heads of block `place` add, and the layer behind it for documents."""
    block, layer = model.cross_blocks[place], model.config.cross_attention_layers[place]
    module = model.backbone.get_submodule(model.info.layers_path)[layer]
    attention = find_child(module, ATTENTION_NAMES)
    if attention is None:
        raise ValueError(f"layer {layer} of the backbone has no attention that documents could be hidden from")
    weight = block.cross_attn.o_proj.weight.float().unflatten(1, (-1, model.info.head_dim))
    found: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = block.input_layernorm(layer_input(args, kwargs).to(block.attention_gate))
        mixed = block.cross_attn.read(states, link, place)[batch.predicts].float()
        found[:] = [torch.einsum("thd,ohd->hto", mixed.unflatten(-1, (-1, model.info.head_dim)), weight)]

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # not by a call, which would come here again
        without = attention.forward(*args, **_without_hidden(args, kwargs, batch.hidden))
        wanted, each = (output[0] - without[0])[batch.predicts].float(), found[0]
        products = (
            torch.einsum("hto,gto->hg", each, each),
            torch.einsum("hto,to->h", each, wanted),
            wanted.square().sum(),
        )
        for total, product in zip(totals, products, strict=True):
            total += product.cpu()

    with (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        attention.register_forward_hook(leave, with_kwargs=True),
    ):
        yield


def hidden_in(attention: nn.Module, hidden: Tensor) -> RemovableHandle:
    """Inside of this handle, `hidden` [rows, 1, tokens, tokens] is taken from the mask that one attention is given."""
    return attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, _without_hidden(args, kwargs, hidden)), with_kwargs=True
    )


def _check_masks(backbone: PreTrainedModel, what: str, otherwise: str = "") -> None:
    """Raises ValueError if documents can't be hidden in its attention (flash attention takes no mask)."""
    if (kind := backbone.config._attn_implementation) not in ("sdpa", "eager"):
        raise ValueError(
            f"{what} with masks, which {kind} doesn't take: load the backbone with attn_implementation=sdpa{otherwise}"
        )


def _without_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
    """Keyword arguments of an attention, `hidden` [rows, 1, tokens, tokens] taken from their mask."""
    states = args[0] if args else kwargs["hidden_states"]
    mask = kwargs.get("attention_mask")
    if mask is None:  # purely causal
        mask = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool, device=states.device).tril()
    allowed = mask if mask.dtype == torch.bool else mask == 0
    additive = torch.zeros(hidden.shape, dtype=states.dtype, device=states.device)
    return {**kwargs, "attention_mask": additive.masked_fill(hidden | ~allowed, torch.finfo(states.dtype).min)}


def _divergence(reference: Tensor, other: Tensor) -> float:
    """KL(reference || other), summed over tokens, in nats. [tokens, vocabulary] both"""
    return float((reference.exp() * (reference - other)).sum())


def describe_placement(backbone: Any, tokenizer: Any, dataset: str, path: Path | None, count: int) -> FittedTable:
    """Layers, nats per answer token lost when documents are hidden there with a bar, and the `count` best of them.

    Raises:
        ValueError: as `read_dataset` and `measure_placement` do.
    """
    builder = PromptBuilder(tokenizer)
    examples = read_dataset(dataset, path, split="train", limit=EXAMPLES)
    prompts = [
        (builder.build(example.query, list(map(builder.segment, example.documents))), builder.answer(example.answer))
        for example in examples
        if example.documents
    ]
    chosen = short_prompts(prompts)
    losses, without = measure_placement(backbone, chosen)
    if min(count, len(losses)) < 1:
        raise ValueError(f"{count} cross blocks, but documents can be read in {len(losses)} layers")
    best = sorted(sorted(losses, key=lambda layer: -losses[layer])[:count])
    most = max(*losses.values(), 1e-9)
    lines = []
    for layer, loss in losses.items():
        bar = "\u2588" * round(BAR * max(loss, 0.0) / most)
        lines.append((f"{layer}", f"{loss:.3f}", f"{bar}{' *' if layer in best else ''}"))
    caption = f"all layers together: {without:.3f}\nmodel.cross_attention_layers={best}"
    title = f"where documents are read ({len(chosen)} questions of {dataset})"
    return FittedTable(("layer", "nats lost without", ""), lines, title, caption, left=("",))
