"""The nano backbone's tokenizer: byte-level BPE trained on generated text, able to read any text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from comb_training.nano import world as words
from comb_training.nano.world import World

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
VOCAB_SIZE = 2048
# Kept whole by the tokenizer although the generator never says them: ordinary English a user may type.
_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an "
    "they which one you were her all she there would their we him been has when who will more no if out "
    "so said what up its about into than them can only other new some could time these two may then do "
    "first any my now such like our over man me even most made after also did many before must through "
    "back years where much your way well down should because each just those people how too little state "
    "good very make world still own see men work long get here between both life being under never day "
    "same another know while last might us great old year off come since against go came right used take "
    "three document documents question answer name city country company found founded born family house "
    "home school water food music book books read write number small large high part place thing things "
    "every again without does done going went told asked think thought say left night morning week month "
    "during near next always often together until around however early later best better"
)
COMMON_ENGLISH = tuple(_COMMON.split())
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}{{ raise_exception('only user and assistant messages are known, got ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def corpus(seed: int) -> Iterator[str]:
    """Text to learn merges from: scenes of the train split, then each word often enough to end as one token."""
    world = World(seed, "train")
    for index in range(600):
        scene = world.scene(1 + index % 8, 8)
        yield from scene.documents
        yield from (text for question in scene.questions for text in (question.query, question.answer))
    # Names open sentences and documents, so they are needed with and without the space before them.
    for word in (*words.FIRST_NAMES, *words.LAST_NAMES, *words.COMPANY_HEADS):
        yield from itertools.repeat(word, 40)
    lexicon = (
        words.FIRST_NAMES, words.LAST_NAMES, words.COMPANY_HEADS, words.COMPANY_TAILS, words.CITIES,
        words.INSTRUMENTS, words.DISHES, words.PRODUCTS, words.YEARS, words.PLACES,
    )  # fmt: skip
    for word in itertools.chain(*lexicon):
        yield from itertools.repeat(f" {word}", 40)
    for word in COMMON_ENGLISH:
        yield from itertools.repeat(f" {word}", 20)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer; all 256 bytes are in its alphabet, so every text survives a round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
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
