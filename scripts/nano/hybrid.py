"""Make the hybrid nano backbone: the nano with Mamba-2 layers that have learned to stand for some of its attention.

From a random start so small a hybrid doesn't learn in minutes on a CPU to bind facts to names. So it starts as the
nano: what looks facts up across documents stays attention; the layers in `LINEAR` first learn, each alone, what the
attention they stand for adds to the stream, then the whole model learns from the nano's distributions and the data.
Without its linear layers it answers nothing: layer 0 tells every token what stands around it.

Source of the two steps: Bick et al. 2024, "Transformers to SSMs" (MOHAWK); Wang et al. 2024, "The Mamba in the Llama".
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, BambaConfig, BambaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from comb_training.nano import CHECKPOINT, HYBRID_CHECKPOINT
from comb_training.nano.world import World
from scripts.nano.evaluate import exact_match
from scripts.nano.packing import EncodedScene, PackedRows, encode, pack
from scripts.nano.pretrain import STAGES, Optimizers, loss_of, save_checkpoint

logger = logging.getLogger(__name__)

LINEAR = (0, 3, 4)


@dataclass(frozen=True)
class HybridRecipe:
    """Everything that decides the checkpoint."""

    seed: int = 0
    matching_steps: int = 200
    distillation_steps: int = 500
    scenes: int = 8
    questions: int = 2  # of a scene, each a row of its own: a state can't leave out the question before
    document_weight: float = 0.1
    matching_lr: float = 4e-3
    adamw_lr: float = 7e-4
    muon_lr: float = 3e-3
    threads: int = 1


def build_hybrid(nano: LlamaForCausalLM, seed: int) -> BambaForCausalLM:
    """A Bamba with the nano's weights, but for its Mamba-2 mixers, which are random."""
    torch.manual_seed(seed)
    old = nano.config
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    config = BambaConfig(
        **{name: getattr(old, name) for name in same},
        rope_parameters={**old.rope_parameters, "partial_rotary_factor": 1.0},
        attn_layer_indices=[index for index in range(old.num_hidden_layers) if index not in LINEAR],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_chunk_size=64,
        z_loss_coefficient=0.0,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    model = BambaForCausalLM(config)
    model.model.embed_tokens.load_state_dict(nano.model.embed_tokens.state_dict())
    model.model.final_layernorm.load_state_dict(nano.model.norm.state_dict())
    for index, (layer, source) in enumerate(zip(model.model.layers, nano.model.layers, strict=True)):
        layer.input_layernorm.load_state_dict(source.input_layernorm.state_dict())
        layer.pre_ff_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
        layer.feed_forward.load_state_dict(source.mlp.state_dict())
        if index not in LINEAR:
            layer.self_attn.load_state_dict(source.self_attn.state_dict())
    return model


def row_stream(tokenizer: PreTrainedTokenizerFast, recipe: HybridRecipe) -> Iterator[PackedRows]:
    """Endless batches of prompts with one question each, as hard as the nano's last stage; two scenes may be short."""
    stage = STAGES[-1]
    world = World(
        recipe.seed + 1, "train", pronouns=stage.pronouns, stories=stage.stories, longest_story=stage.longest_story
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        rows = []
        for number in range(recipe.scenes):
            fewest = 1 if number < 2 else 3
            count = int(torch.randint(fewest, stage.most + 1, (), generator=generator))
            scene = encode(tokenizer, world.scene(count, recipe.questions))
            asked = zip(scene.asks, scene.answers, scene.kinds, strict=True)
            rows += [EncodedScene(scene.context, [ask], [answer], [kind]) for ask, answer, kind in asked]
        yield pack(rows, int(tokenizer.pad_token_id), recipe.document_weight)


def match_layers(
    model: BambaForCausalLM, nano: LlamaForCausalLM, stream: Iterator[PackedRows], recipe: HybridRecipe
) -> None:
    """Teaches each linear layer what the attention in its place adds to the nano's stream there."""
    mixers = {index: model.model.layers[index].mamba for index in LINEAR}
    parameters = [parameter for mixer in mixers.values() for parameter in mixer.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95))
    bar = tqdm(range(recipe.matching_steps), desc="linear layers, each alone")
    for step in bar:
        rows = next(stream)
        real = (rows.weights > 0)[..., None]
        with torch.no_grad():
            streams = nano(input_ids=rows.input_ids, output_hidden_states=True).hidden_states
        errors = []
        for index, mixer in mixers.items():
            before = nano.model.layers[index].input_layernorm(streams[index])
            wanted = _attention(nano, index, before)
            distance = (mixer(before) - wanted).square() * real
            errors.append(distance.sum() / (wanted.square() * real).sum())
        optimizer.param_groups[0]["lr"] = recipe.matching_lr * min(1.0, (step + 1) / 20, 1 - step / len(bar))
        torch.stack(errors).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix({f"layer {index}": f"{error:.2f}" for index, error in zip(mixers, errors, strict=True)})


@torch.no_grad()
def _attention(nano: LlamaForCausalLM, index: int, normed: Tensor) -> Tensor:
    places = torch.arange(normed.shape[1])[None]
    rotation = nano.model.rotary_emb(normed, places)
    found: Tensor = nano.model.layers[index].self_attn(normed, position_embeddings=rotation, attention_mask=None)[0]
    return found


def distil(model: BambaForCausalLM, nano: LlamaForCausalLM, stream: Iterator[PackedRows], recipe: HybridRecipe) -> None:
    """Cross entropy on the data plus KL to the nano, down to a learning rate of zero."""
    optimizers = Optimizers(model, recipe.muon_lr, recipe.adamw_lr)
    bar = tqdm(range(recipe.distillation_steps), desc="all layers")
    for step in bar:
        rows = next(stream)
        where = rows.weights > 0
        with torch.no_grad():
            wanted = nano(input_ids=rows.input_ids).logits[where].log_softmax(-1)
        logits = model(input_ids=rows.input_ids).logits[where]
        divergence = nn.functional.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="none").sum(-1)
        weights = rows.weights[where]
        loss = loss_of(logits, rows, where) + (divergence * weights).sum() / weights.sum()
        optimizers.step(loss, min(1.0, (step + 1) / 20, 1 - step / len(bar)))
        bar.set_postfix(loss=f"{loss.item():.3f}")


def main() -> None:
    """Train from the nano and the seed, evaluate with plain greedy generation, write the checkpoint."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    recipe, output = HybridRecipe(), Path(sys.argv[1]) if sys.argv[1:] else HYBRID_CHECKPOINT
    torch.set_num_threads(recipe.threads)
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    nano = LlamaForCausalLM.from_pretrained(CHECKPOINT).eval().requires_grad_(False)
    model, stream = build_hybrid(nano, recipe.seed), row_stream(tokenizer, recipe)
    match_layers(model, nano, stream, recipe)
    distil(model, nano, stream, recipe)
    model.eval()
    result = exact_match(model, tokenizer, num_scenes=100, seed=20_000)
    logger.info("held-out greedy generation: %s", result)
    model.generation_config = nano.generation_config
    how = {"recipe": asdict(recipe), "linear_layers": list(LINEAR), "held_out_generate": result}
    save_checkpoint(output, model, tokenizer, started, **how)


if __name__ == "__main__":
    main()
