"""Structured initialisation: a start from which so small a model learns to bind facts to names.

From a random start the model stays for long on a plateau where it knows the kind of the answer but not whose it
is. What ends that plateau is an induction circuit (Olsson et al. 2022, "In-context Learning and Induction Heads")
that also minds the subject, so a rough one is written into the first three layers: heads that read the token before,
the surroundings and the word that opens the document, then heads that find where the current token stood before in
such company and copy what followed it there. Training refines it; everything else starts as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from scripts.nano.tokenizer import ASSISTANT, USER

_SPACE = "\u0120"  # how byte-level BPE writes a leading space
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM = 128, 4, 2, 32
_HALF = _HEAD_DIM // 2
_ROPE_THETA = 10_000.0


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """The untrained nano backbone: 6 Llama layers of width 128, tied embeddings, fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    basis = torch.linalg.qr(torch.randn(_HIDDEN, _HIDDEN))[0].T  # orthonormal rows, shared out below
    parts = _Subspaces(*basis.split([1, 32, 32, 16, 16, 31]))
    with torch.no_grad():
        _init_embeddings(model.get_input_embeddings().weight, tokenizer, parts)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        _read_token_before(model.model.layers[0].self_attn, parts)
        _read_surroundings(model.model.layers[0].self_attn, parts)
        openings = tokenizer.convert_tokens_to_ids([USER, ASSISTANT]) + tokenizer("\n")["input_ids"]
        _read_subject(model.model.layers[1].self_attn, parts, model.get_input_embeddings().weight[openings])
        _look_up(model.model.layers[2].self_attn, parts)
    return model


@dataclass(frozen=True)
class _Subspaces:
    """Orthonormal directions of the residual stream, each [directions, hidden], and what stands in them."""

    constant: Tensor  # the same in every token: what a head needs to attend by position alone
    code: Tensor  # part of the token's own embedding
    before: Tensor  # the code of the token before
    topic: Tensor  # the codes of the last ten tokens or so, which tell whom a sentence is about
    subject: Tensor  # the code of the word that opens the document, query or answer
    rest: Tensor  # another part of the token's own embedding


def _init_embeddings(embedding: Tensor, tokenizer: PreTrainedTokenizerFast, parts: _Subspaces) -> None:
    """Embeddings [vocabulary, hidden] near those of the same word after a space, empty where layer 0 writes."""
    vocabulary = tokenizer.get_vocab()
    for token, index in vocabulary.items():
        spaced = vocabulary.get(_SPACE + token)
        if spaced is not None:
            embedding[index] = 0.6 * embedding[index] + 0.8 * embedding[spaced]
    taken = torch.cat([parts.constant, parts.before, parts.topic, parts.subject])
    embedding -= embedding @ taken.T @ taken
    # One length for all, because what a head sees of the constant is divided by it.
    embedding.copy_(0.9 * torch.nn.functional.normalize(embedding) + 0.3 * parts.constant)


def _read_token_before(attention: LlamaAttention, parts: _Subspaces) -> None:
    """Head 0 attends one position back and writes that token's code.

    A rotary query (cos w, -sin w) meets a key (1, 0) best at distance 1, for every frequency w; the fast ones tell
    neighbours apart.
    """
    angle = _ROPE_THETA ** (-torch.arange(_HALF) / _HALF)
    fast = (torch.arange(_HALF) < 7).float()
    key, query = torch.cat([fast, torch.zeros(_HALF)]), torch.cat([fast * angle.cos(), -fast * angle.sin()])
    attention.k_proj.weight[:_HEAD_DIM] = 2.0 * key[:, None] * parts.constant
    attention.q_proj.weight[:_HEAD_DIM] = 2.0 * query[:, None] * parts.constant
    attention.v_proj.weight[:_HEAD_DIM] = parts.code
    attention.o_proj.weight[:, :_HEAD_DIM] = 0.15 * parts.before.T


def _read_surroundings(attention: LlamaAttention, parts: _Subspaces) -> None:
    """Head 2 attends to the last ten tokens or so and writes their codes; frequencies 3 to 6 fall off that fast."""
    head, shared = slice(2 * _HEAD_DIM, 3 * _HEAD_DIM), slice(_HEAD_DIM, 2 * _HEAD_DIM)
    broad = torch.zeros(_HEAD_DIM)
    broad[3:7] = 1.0
    attention.k_proj.weight[shared] = 0.9 * broad[:, None] * parts.constant
    attention.q_proj.weight[head] = 0.9 * broad[:, None] * parts.constant
    attention.v_proj.weight[shared] = parts.code
    attention.o_proj.weight[:, head.start : head.start + 16] = 0.5 * parts.topic.T


def _read_subject(attention: LlamaAttention, parts: _Subspaces, openings: Tensor) -> None:
    """Head 0 attends to the last token that follows one of `openings` [count, hidden] and writes its code."""
    marks = torch.nn.functional.normalize(openings @ parts.code.T).sum(0) @ parts.before
    recent = torch.zeros(_HEAD_DIM)
    recent[5:9] = 0.9
    attention.k_proj.weight[:_HEAD_DIM] = recent[:, None] * marks
    attention.q_proj.weight[:_HEAD_DIM] = recent[:, None] * parts.constant
    attention.v_proj.weight[:_HEAD_DIM] = parts.code
    attention.o_proj.weight[:, : len(parts.subject)] = 0.3 * parts.subject.T


def _look_up(attention: LlamaAttention, parts: _Subspaces) -> None:
    """Heads 0 and 2 find where the current token stood before, and copy what followed it there.

    Of two places that fit, head 0 prefers the one in a document with the same subject, head 2 the one in the same
    surroundings. Only frequencies that hardly turn within a prompt carry content.
    """
    slow = torch.arange(_HALF - 9, _HALF)
    odd, even = (torch.cat([part, part + _HALF]) for part in (slow[::2], slow[1::2]))
    for index, (copied, about) in enumerate(((parts.code, parts.subject), (parts.rest, parts.topic))):
        first = index * len(odd)
        _match(attention, index, odd, parts.before[first : first + len(odd)], parts.code[first : first + len(odd)])
        _match(attention, index, even, about[: len(even)], about[: len(even)])
        attention.v_proj.weight[index * _HEAD_DIM : index * _HEAD_DIM + len(copied)] = copied
        column = 2 * index * _HEAD_DIM
        attention.o_proj.weight[:, column : column + len(copied)] = 0.15 * copied.T


def _match(attention: LlamaAttention, key_head: int, rows: Tensor, wanted: Tensor, own: Tensor) -> None:
    """Let the first query head of `key_head` look, in `rows` of the head, for keys whose `wanted` is its `own`."""
    attention.k_proj.weight[key_head * _HEAD_DIM + rows] = 1.6 * wanted
    attention.q_proj.weight[2 * key_head * _HEAD_DIM + rows] = 1.6 * own
