"""PICEngine: settings of generation, and answers as streams."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from comb.engine.engine import PICEngine, UnknownDocumentError
from tests.helpers.tiny_engine import CITY, LAKE, NEW, QUESTION, Always, make_backbone, states

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- generation settings ----


def test_greedy_is_the_default_whatever_the_model_prefers(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make_backbone()
    greedy = PICEngine(model, tokenizer, method="full").ask(QUESTION, [LAKE], max_new_tokens=NEW)
    sampling = make_backbone()
    sampling.generation_config.update(do_sample=True, temperature=5.0, top_k=200)
    engine = PICEngine(sampling, tokenizer, method="full")
    with caplog.at_level(logging.WARNING):
        assert engine.ask(QUESTION, [LAKE], max_new_tokens=NEW).token_ids == greedy.token_ids
        for settings in ({"temperature": 0}, {"temperature": 0.0, "do_sample": True}, {"do_sample": False}):
            assert engine.ask(QUESTION, [LAKE], max_new_tokens=NEW, **settings).token_ids == greedy.token_ids
    assert not caplog.records
    config = GenerationConfig(max_new_tokens=2)
    assert engine.ask(QUESTION, [LAKE], generation_config=config).token_ids == greedy.token_ids[:2]


def test_sampling_when_it_is_asked_for(engine: PICEngine) -> None:
    def draw(**settings: Any) -> set[tuple[int, ...]]:
        torch.manual_seed(0)
        return {engine.ask(QUESTION, [LAKE], max_new_tokens=NEW, **settings).token_ids for _ in range(4)}

    assert len(draw(temperature=3.0)) > 1
    assert len(draw(do_sample=True, temperature=3.0)) > 1
    assert len(draw(top_k=1)) == 1
    assert len(draw(num_beams=2)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be .* at least 1, got 0"),
        ({"max_new_tokens": -3}, "got -3"),
        ({"max_new_tokens": True}, "got True"),
        ({"temperature": -1}, "temperature .* got -1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"num_return_sequences": 2}, "one answer per question"),
        ({"max_new_tokens": 600}, "need 609 positions, the backbone has 512: ask for at most 503"),
        ({"max_new_token": 5}, "max_new_token"),
    ],
)
def test_bad_settings(engine: PICEngine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.ask(QUESTION, [LAKE], **settings)


def test_stop_strings_need_no_second_tokenizer(engine: PICEngine) -> None:
    whole = engine.ask(QUESTION, [LAKE], max_new_tokens=NEW)
    end = engine.tokenizer.decode(whole.token_ids[1:2])
    for settings in ({"stop_strings": [end]}, {"generation_config": GenerationConfig(stop_strings=end)}):
        stopped = engine.ask(QUESTION, [LAKE], max_new_tokens=NEW, **settings)
        assert stopped.token_ids == whole.token_ids[:2]


def test_default_length_stays_within_the_positions(tokenizer: Any) -> None:
    model = make_backbone(max_position_embeddings=40)
    answer = PICEngine(model, tokenizer, method="full").ask("x" * 30)
    assert answer.report.answer_tokens == 10


def test_end_token_of_the_tokenizer_when_the_model_names_none(tokenizer: Any) -> None:
    model = make_backbone(eos_token_id=None)
    assert model.generation_config.eos_token_id is None
    engine = PICEngine(model, tokenizer, method="full")
    answer = engine.ask(QUESTION, max_new_tokens=NEW, logits_processor=[Always(257)])
    assert (answer.token_ids, answer.text) == ((257,), "")


def test_caller_keeps_their_own_stopping_criteria_and_streamer(engine: PICEngine) -> None:
    stopping = [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= len(QUESTION) + 2)]
    assert len(engine.ask(QUESTION, [LAKE], max_new_tokens=NEW, stopping_criteria=stopping).token_ids) == 2
    assert len(stopping) == 1


# ---- streams ----


def test_stream_gives_the_answer_in_pieces(engine: PICEngine) -> None:
    space = Always(engine.tokenizer.encode(" ")[0])
    stream = engine.stream(QUESTION, [LAKE, CITY], max_new_tokens=NEW, logits_processor=[space])
    pieces = list(stream)
    assert pieces == [" "] * NEW
    assert stream.answer.text == " " * NEW
    assert states(stream) == ["compiled", "compiled"]
    assert 0 < stream.report.ttft_s < stream.report.total_s
    assert list(stream) == []
    free = engine.stream(QUESTION, [LAKE, CITY], max_new_tokens=40)
    text = "".join(free)
    assert text == free.answer.text == engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=40).text


def test_first_piece_comes_before_the_last_token(engine: PICEngine) -> None:
    gate = threading.Event()
    held = Always(engine.tokenizer.encode(" ")[0], lambda: held.steps < 3 or gate.wait(10))
    stream = engine.stream(QUESTION, [LAKE], max_new_tokens=NEW, logits_processor=[held])
    assert next(stream) == " "
    with pytest.raises(RuntimeError, match="no answer: this stream is running"):
        _ = stream.report
    gate.set()
    assert len(list(stream)) == NEW - 1


def test_stream_errors_reach_the_reader(engine: PICEngine) -> None:
    def fail() -> None:
        if space.steps == 3:
            raise OSError("disk on fire")

    space = Always(engine.tokenizer.encode(" ")[0], fail)
    stream = engine.stream(QUESTION, [LAKE], max_new_tokens=NEW, logits_processor=[space])
    pieces: list[str] = []
    with pytest.raises(OSError, match="disk on fire"):
        deque(map(pieces.append, stream))
    assert pieces == [" ", " "]
    assert list(stream) == []
    with pytest.raises(RuntimeError):
        _ = stream.answer
    with pytest.raises(UnknownDocumentError):
        engine.stream(QUESTION, document_ids=["nope"])
    with pytest.raises(ValueError, match="streamer"):
        engine.stream(QUESTION, streamer=object())


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_an_abandoned_stream_stops_and_gives_back(engine: PICEngine, how: str) -> None:
    space = Always(engine.tokenizer.encode(" ")[0], lambda: time.sleep(0.002))
    stream = engine.stream(QUESTION, [LAKE], max_new_tokens=500, logits_processor=[space])
    assert next(stream) == " "
    assert engine.store.stats().in_use == 1
    if how == "close":
        stream.close()
        assert 0 < stream.report.answer_tokens < 500
    elif how == "with":
        with stream:
            next(stream)
    del stream
    gc.collect()
    deadline = time.monotonic() + 10
    while engine.store.stats().in_use and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.store.stats().in_use == 0
    assert space.steps < 500
