"""Segments that are found in prompts: cut by what stands there, whatever is around it."""

from __future__ import annotations

import random
import string
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from comb.backbones.tokenizer import load_tokenizer
from comb.documents.found import SegmentFinder
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.chunks import passage

NANO = load_tokenizer("nano")
DRAW = random.Random(3)

CHUNKS = [passage(DRAW, 40) for _ in range(6)]


def chat(text: str, question: str = "Where?") -> list[int]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    messages.append({"role": "user", "content": question})
    return list(NANO.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def pieces(finder: SegmentFinder, token_ids: list[int]) -> set[tuple[int, ...]]:
    """What is found, checked to be apart, long enough and without special tokens."""
    special = {number for number, token in finder.tokenizer.added_tokens_decoder.items() if token.special}
    found, end = set(), 0
    for start, tokens in finder.find(token_ids):
        assert start >= end
        assert finder.least <= tokens
        end = start + tokens
        assert end <= len(token_ids)
        found.add(tuple(token_ids[start:end]))
        assert not special.intersection(token_ids[start:end])
    return found


LABELS = ["Passage {}: {}", "[{}] {}", "Document [{}]\n{}", '<document id="{}">\n{}\n</document>']


def labelled(chunks: list[str], label: str = LABELS[0]) -> str:
    return "\n".join(label.format(n, chunk) for n, chunk in enumerate(chunks, 1))


@pytest.mark.parametrize("label", LABELS)
def test_chunks_are_found_in_any_order_under_any_number(label: str) -> None:
    finder, write = SegmentFinder(NANO, least=16, most=256), partial(labelled, label=label)
    first = pieces(finder, chat("Answer.\n" + write(CHUNKS)))
    other = pieces(finder, chat("Be short.\n" + write(CHUNKS[3:] + CHUNKS[:3]), "When?"))
    assert len(first & other) == len(CHUNKS)
    texts = {NANO.decode(piece).strip() for piece in first & other}
    assert texts <= set(CHUNKS) | {chunk.removesuffix(".") for chunk in CHUNKS}
    # a message begins a line, whatever its template puts in front
    bare = [pieces(finder, chat(write(order))) for order in (CHUNKS, CHUNKS[::-1])]
    assert len(bare[0] & bare[1]) == len(CHUNKS)
    # the control: as one run of lines, whose cuts aren't where chunks end
    assert not first & pieces(finder, chat(" ".join(CHUNKS)))


SPLITS = {  # how families cut text into words before they look for tokens
    "gpt2": None,
    "llama3": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    "qwen": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    "lines": r"\n+|[^\n]{1,40}",  # tokens over several words
    "whole": r"(?m:.+)",  # tokens over a line's end
}


@cache
def made_tokenizer(name: str) -> Any:
    """Of 600 tokens, trained on such chunks."""
    model, form = name.split(" ")
    trainer_of = {"bpe": trainers.BpeTrainer, "unigram": trainers.UnigramTrainer}[model]
    if form in SPLITS:
        made = Tokenizer(models.BPE() if model == "bpe" else models.Unigram())
        split = [] if SPLITS[form] is None else [pre_tokenizers.Split(Regex(SPLITS[form]), "isolated")]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=SPLITS[form] is None)
        made.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
        made.decoder = decoders.ByteLevel()
        trainer = trainer_of(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    else:  # of SentencePiece, trained line by line: a space in front always, once or never, words apart or not
        scheme, _, whole = form.partition("-")
        made = Tokenizer(models.BPE(byte_fallback=True) if model == "bpe" else models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=not whole)
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
        characters = sorted({character for text in [*CHUNKS, *string.printable] for character in text})
        trainer = trainer_of(vocab_size=600, initial_alphabet=characters, show_progress=False)
    texts = [labelled(OTHERS, label) for label in LABELS] + LEADS + OTHERS
    texts = texts if form in SPLITS else [line for text in texts for line in text.splitlines()]
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


LEADS = ["Read.", "Answer in one word, please, and be kind.", "\tNow:"]
OTHERS = [passage(random.Random(place), 50) for place in range(60)]
TOKENIZERS = [
    f"{model} {form}"
    for model in ("bpe", "unigram")
    for form in (*SPLITS, "always", "first", "never", "always-whole", "never-whole")
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_twenty_tokenizers_find_the_same_text_elsewhere(name: str) -> None:
    """Tokens over a cut, which other text changes, are in no segment; what is left is the same wherever it stands."""
    tokenizer = made_tokenizer(name)
    finder = SegmentFinder(tokenizer, least=12, most=512)
    orders = [CHUNKS, CHUNKS[3:] + CHUNKS[:3], CHUNKS[::-1]]
    asked = [f"{lead}\n{labelled(order)}\n\nWhere is Ada?" for lead, order in zip(LEADS, orders, strict=True)]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked]
    found = [pieces(finder, ids) for ids in prompts]
    common = found[0] & found[1] & found[2]
    # where tokens are cut without regard to words, what stands before a text may change more than its first token
    least = 4 if name.endswith(("lines", "whole")) else len(CHUNKS)
    assert len(common) >= least, [len(own) for own in found]
    assert sum(map(len, common)) > 0.12 * least * len(prompts[0])


def test_an_insertion_moves_what_it_is_in() -> None:
    finder = SegmentFinder(NANO, least=16, most=128)
    lines = [passage(DRAW, DRAW.randint(4, 12)) for _ in range(120)]
    before = pieces(finder, NANO("\n".join(lines))["input_ids"])
    after = pieces(finder, NANO("\n".join([*lines[:60], "Something was put in.", *lines[60:]]))["input_ids"])
    assert len(before) > 10
    assert len(before - after) <= 2
    # and in text without lines
    finder = SegmentFinder(NANO, least=16, most=64)
    text = " ".join(lines)
    before, after = (pieces(finder, NANO(each)["input_ids"]) for each in (text, "Now " + text))
    assert len(before - after) <= len(before) // 4


@pytest.mark.parametrize("between", ["\n\n", "\n\nShort.\n\n"])
def test_a_line_that_changes_leaves_the_paragraph_behind_it_what_it_is(between: str) -> None:
    """An agent's date and folder, above all that comes again; the control: a paragraph that is no segment alone."""
    finder, rules = SegmentFinder(NANO, least=16, most=256), passage(DRAW, 30)

    def kept(paragraph: str) -> set[tuple[int, ...]]:
        texts = (f"It is {when}.{between}{paragraph}\n\n{rules}" for when in ("noon in Rome", "late"))
        first, other = (pieces(finder, NANO(text)["input_ids"]) for text in texts)
        return first & other

    assert len(kept(passage(DRAW, 20))) == 2
    assert len(kept("Be brief.")) == 1


def test_what_was_found_in_a_message_is_remembered_for_who_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, read = SegmentFinder(NANO, least=16, most=256), list[int]()
    joints = SegmentFinder._joints

    def counted(self: SegmentFinder, token_ids: Any) -> Any:
        read.append(len(token_ids))
        return joints(self, token_ids)

    monkeypatch.setattr(SegmentFinder, "_joints", counted)
    text = labelled(CHUNKS)
    first, longer = chat(text), chat(text, "And when was that, and who was there?")
    found = finder.find(first, "alice")
    assert len(found) == len(CHUNKS)
    tokens = sum(read)
    assert tokens == len(first)
    assert finder.find(first, "alice") == found
    assert sum(read) == tokens
    assert finder.find(longer, "alice") == found
    assert sum(read) - tokens < len(longer) / 4  # the new question alone
    finder.find(first, "bob")
    assert sum(read) > 2 * tokens


def test_nothing_is_found_where_tokens_have_no_places_in_a_text() -> None:
    finder = SegmentFinder(NANO, least=8, most=64)
    assert pieces(finder, chat("\n".join(CHUNKS), passage(DRAW, 60)))
    token_ids = NANO("\n".join(CHUNKS))["input_ids"]
    assert finder.find(token_ids)
    assert finder.find([]) == []
    # tokens that the tokenizer makes of no text: a word in two halves
    split = next(at for at, token in enumerate(token_ids) if len(NANO.decode([token]).strip()) > 3)
    word = NANO.decode([token_ids[split]])
    halves = [token for half in (word[:2], word[2:]) for token in NANO(half, add_special_tokens=False)["input_ids"]]
    odd = [*token_ids[:split], *halves, *token_ids[split + 1 :]]
    assert NANO.decode(odd) == NANO.decode(token_ids)
    assert finder.find(odd) == []
    slow = SimpleNamespace(is_fast=False, added_tokens_decoder=NANO.added_tokens_decoder)
    assert SegmentFinder(slow, least=8, most=64).find(token_ids) == []
    bytes_of = byte_tokenizer()
    assert SegmentFinder(bytes_of, least=16, most=256).find(bytes_of("\n".join(CHUNKS))["input_ids"])


def test_patterns_of_ones_own() -> None:
    text = "\n".join(f"## tool {n}\n{chunk}" for n, chunk in enumerate(CHUNKS))
    mine = SegmentFinder(NANO, least=16, most=256, patterns=[r"## tool \d+"])
    one, other = (NANO(each)["input_ids"] for each in (text, "\n".join(text.split("\n")[2:])))
    assert len(pieces(mine, one) & pieces(mine, other)) == len(CHUNKS) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": ["("]}, "no regular expression"),
        ({"patterns": ["a*"]}, "matches nothing at all"),
        ({"least": 4}, "8 to 512, not 4"),
        ({"least": 600}, "8 to 512, not 600"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentFinder(NANO, **options)
