"""The nano backbone's tokenizer: byte-level BPE trained on generated text, able to read any text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import lexicon as lex
from .world import World

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
VOCAB_SIZE = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}{{ raise_exception('only user and assistant messages are known, got ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def world_words() -> tuple[str, ...]:
    """Every name and value of the world, in the order of the lexicon."""
    lists = (
        lex.FIRST_NAMES, lex.LAST_NAMES, lex.COMPANY_HEADS, lex.COMPANY_TAILS, lex.CITIES,
        lex.INSTRUMENTS, lex.DISHES, lex.PRODUCTS, lex.YEARS, lex.PLACES,
    )  # fmt: skip
    return tuple(itertools.chain(*lists))


def corpus(seed: int, num_scenes: int = 600) -> Iterator[str]:
    """Text to learn merges from: scenes of the train split, then each word often enough to end as one token."""
    world = World(seed, "train")
    for index in range(num_scenes):
        scene = world.scene(1 + index % 8, 8)
        yield from scene.documents
        yield from (text for question in scene.questions for text in (question.query, question.answer))
    # Names open sentences and documents, so they are needed with and without the space before them.
    for word in (*lex.FIRST_NAMES, *lex.LAST_NAMES, *lex.COMPANY_HEADS):
        yield from itertools.repeat(word, 40)
    for word in world_words():
        yield from itertools.repeat(f" {word}", 40)
    for word in lex.COMMON_ENGLISH:
        yield from itertools.repeat(f" {word}", 20)


def train_tokenizer(seed: int, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train the tokenizer; all 256 bytes are in its alphabet, so every text survives a round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(seed), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
