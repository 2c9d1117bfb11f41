"""Settings of Hugging Face ``generate`` as the engine means them, the clock of an answer, and answers as streams."""

from __future__ import annotations

import atexit
import logging
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from queue import SimpleQueue
from typing import Any, Self

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from comb.backbones.forward import CACHES
from comb.engine import DEFAULT_MAX_NEW_TOKENS
from comb.engine.report import Answer, Report
from comb.locks import held_here

logger = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_PROMPT = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_healing", *CACHES)
"""Arguments of ``generate`` that say or change what the prompt is."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A SentencePiece token of one byte. A run of them that isn't UTF-8 is written as replacement characters throughout."""
_CLOSES_UP = re.compile(r"[ '].{0,4}\Z", re.DOTALL)
"""What `clean_up_tokenization` may still change at a text's end: " n" if "'t" follows, " " in front of a full stop."""


def decoding_settings(arguments: Mapping[str, Any], backbone: Any, tokenizer: Any) -> dict[str, Any]:
    """Keyword arguments for ``generate``: greedy unless sampling is asked for, with end and padding tokens.

    Sampling is asked for by ``do_sample=True`` or by giving any of its parameters; ``temperature=0`` is greedy.
    End tokens, a list or None, are the backbone's ``generation_config``'s, else the tokenizer's.

    Raises:
        ValueError: max_new_tokens below 1, a negative temperature, more than one answer per question, or another prompt
            than question and documents.
    """
    settings = dict(arguments)
    given = settings.pop("generation_config", None)
    if given is not None:
        whole = {key: value for key, value in given.to_diff_dict().items() if key != "transformers_version"}
        settings = {**whole, **settings}
    if other := [name for name in _PROMPT if settings.get(name) is not None and settings[name] is not False]:
        raise ValueError(f"question and documents are the prompt: leave {other[0]} out, or call the model's generate()")
    count, sequences = settings.get("max_new_tokens"), settings.get("num_return_sequences")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"max_new_tokens must be an integer of at least 1, got {count!r}")
    if sequences not in (None, 1):
        raise ValueError(
            f"num_return_sequences={sequences}: the engine gives one answer per question; use ask_batch with the "
            "question repeated"
        )
    for name in ("num_beams", "repetition_penalty", *_SAMPLING):  # which others compare before they look at the type
        if (value := settings.get(name)) is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ValueError(f"{name} is a number, not {value!r}")
    if settings.get("num_beams") == 0:
        raise ValueError("num_beams=0: 1 is greedy, or sampling")
    # beside penalty_alpha, top_k is contrastive search's, of which transformers says what became
    names = [key for key in _SAMPLING if key != "top_k" or not settings.get("penalty_alpha")]
    sampling = [key for key in names if settings.get(key) is not None]
    temperature, sample = settings.get("temperature"), settings.get("do_sample")
    # NaN fails this comparison too
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number of at least 0 (0 is greedy), got {temperature!r}")
    if temperature == 0:
        sample = False
    elif sample is None:
        sample = bool(sampling)
    elif not sample and sampling:
        logger.warning("%s has no effect with do_sample=False", ", ".join(sampling))
    settings["do_sample"] = sample
    if not sample:
        # None also overrides sampling parameters in the model's own generation_config
        settings.update(dict.fromkeys(names))
    own = backbone.generation_config
    eos = _first(settings.get("eos_token_id"), own.eos_token_id, tokenizer.eos_token_id)
    pad = _first(settings.get("pad_token_id"), own.pad_token_id, tokenizer.pad_token_id)
    ends = None if eos is None else torch.as_tensor(eos).flatten().tolist()
    if pad is None:
        pad = ends[0] if ends else 0
    if _first(settings.get("stop_strings"), own.stop_strings) is not None:
        settings.setdefault("tokenizer", tokenizer)
    # a generation config that asks for several answers can't mean this: a question has one
    return {"num_return_sequences": 1, **settings, "eos_token_id": ends, "pad_token_id": int(pad)}


def with_length(settings: Mapping[str, Any], backbone: Any, prompt_tokens: int, limit: int | None) -> dict[str, Any]:
    """`settings` with a max_new_tokens that fits the backbone's positions behind a prompt.

    Raises:
        ValueError: when the caller asks for more tokens than there are positions left, or for a `max_length` that the
            prompt has.
    """
    wanted = settings.get("max_new_tokens")
    room = None if limit is None else limit - prompt_tokens
    length = settings.get("max_length")
    if wanted is None and length is not None:
        if limit is not None and length > limit:
            raise ValueError(f"max_length={length}, and the backbone has {limit} positions: ask for at most so many")
        wanted = length - prompt_tokens  # `generate` would take the model's own max_new_tokens before it
        if wanted < 1:
            raise ValueError(f"max_length={length}, and the prompt has {prompt_tokens} tokens: ask for more than these")
        return {**settings, "max_length": None, "max_new_tokens": wanted}
    if wanted is not None and room is not None and wanted > room:
        raise ValueError(
            f"prompt ({prompt_tokens} tokens) and max_new_tokens={wanted} need {prompt_tokens + wanted} positions, "
            f"the backbone has {limit}: ask for at most {room} tokens"
        )
    if wanted is None:
        wanted = _first(backbone.generation_config.max_new_tokens, DEFAULT_MAX_NEW_TOKENS)
        wanted = wanted if room is None else min(wanted, room)
    return {**settings, "max_new_tokens": wanted}


def trim(token_ids: list[int], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """One row's new tokens up to and including its end token, behind which a batch is padded."""
    ends = settings["eos_token_id"] or ()
    for position, token in enumerate(token_ids):
        if token in ends:
            return tuple(token_ids[: position + 1])
    return tuple(token_ids)


def check_stream(arguments: Mapping[str, Any], backbone: Any) -> None:
    """Raises ValueError for a `streamer` among the arguments of a stream, and where it would never begin."""
    if "streamer" in arguments:
        raise ValueError("stream() brings its own streamer; use ask(..., streamer=...) for another one")
    if any(each is backbone for each in held_here.get()):
        raise ValueError(
            "a stream is made in another thread, which would wait for ever for this `with mac(...)` to end: give the "
            "engine mac=..., or use ask()"
        )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


class Abandoned(Exception):  # noqa: N818  a signal, not an error
    """Nobody waits for this answer any more."""


def check_wanted(stop: threading.Event | None) -> None:
    """Raises Abandoned if `stop` is set."""
    if stop is not None and stop.is_set():
        raise Abandoned


class FirstTokenTimer(StoppingCriteria):
    """Notes when the first token is there, and stops generation when `stop` is set."""

    def __init__(self, start: float, stop: threading.Event | None = None) -> None:
        self.start = start
        self.stop = stop
        self.ttft_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.ttft_s is None:
            input_ids[:, -1].cpu()  # on an accelerator the token is there only once it can be read
            self.ttft_s = time.perf_counter() - self.start
        stopped = self.stop is not None and self.stop.is_set()
        return torch.full((len(input_ids),), stopped, dtype=torch.bool, device=input_ids.device)


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """An answer's tokens as text, without special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


class _Generation(BaseStreamer):
    """The thread behind a stream, and as its streamer the text so far as no further token changes it.

    It doesn't know the stream, so that one that nobody holds is collected, and stops it. Text is decoded from its
    beginning each time, since a tokenizer writes a token as those around it ask for (the first without its space,
    bytes together): some 0.1 us per token of the answer so far.
    """

    def __init__(self, run: Callable[[Any, threading.Event], Answer], tokenizer: Any) -> None:
        self.pieces: SimpleQueue[str | None] = SimpleQueue()
        self.stop = threading.Event()
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self._tokenizer = tokenizer
        self._ids: list[int] | None = None
        self._given = ""
        self.thread = threading.Thread(target=self._work, args=(run,), name="comb-stream", daemon=True)
        # a thread that is inside torch when the interpreter goes away takes the process down with it
        atexit.register(self.finish)
        self.thread.start()

    def _work(self, run: Callable[[Any, threading.Event], Answer]) -> None:
        try:
            self.answer = run(self, self.stop)
            self._give(self.answer.text)
            if self._given != self.answer.text:
                raise RuntimeError(
                    f"the tokenizer ({type(self._tokenizer).__name__}) has rewritten text that was streamed already: "
                    "stream.answer.text is the answer, and ask() gives it at once"
                )
        except BaseException as error:  # raised again where the stream is read
            self.error = error
            if self.stop.is_set() and not isinstance(error, Abandoned):
                logger.warning("a stream that nobody reads any more failed: %s: %s", type(error).__name__, error)
        finally:
            atexit.unregister(self.finish)
            self.pieces.put(None)

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt at the first call, then new tokens."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        last = self._ids[-1:]
        is_byte = _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(last)[0]))
        # behind a token without text of its own (a special one) it isn't clear that a run of bytes is over
        if not is_byte and answer_text(self._tokenizer, last):
            text = answer_text(self._tokenizer, self._ids)
            if getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
                text = _CLOSES_UP.sub("", text)
            self._give(text.rstrip("\ufffd"))  # half a character

    def end(self) -> None:
        """Nothing: the whole answer's text says what is left."""

    def _give(self, text: str) -> None:
        if text != self._given and text.startswith(self._given):
            self.pieces.put(text[len(self._given) :])
            self._given = text

    def finish(self) -> None:
        """Stops it at the next token, and waits for that."""
        self.stop.set()
        self.thread.join()


class AnswerStream(Iterator[str]):
    """Pieces of an answer's text as they are generated, joined exactly that text; afterwards `answer` and `report`.

    Generation runs in a worker thread. An exception there is raised by the iterator. Dropping or closing the stream
    stops generation at the next token and gives back its documents.

    Args:
        run: makes the answer, given a streamer and the event that tells it to stop. It must not refer to the stream.
        tokenizer: decodes the pieces.
    """

    def __init__(self, run: Callable[[Any, threading.Event], Answer], tokenizer: Any) -> None:
        self._generation = _Generation(run, tokenizer)
        weakref.finalize(self, self._generation.stop.set)

    def __next__(self) -> str:
        generation = self._generation
        if (piece := generation.pieces.get()) is not None:
            return piece
        generation.thread.join()
        generation.pieces.put(None)  # so that another next() ends as well
        error, generation.error = generation.error, None
        if error is not None and not isinstance(error, Abandoned):
            raise error
        raise StopIteration

    @property
    def answer(self) -> Answer:
        """The whole answer. Raises RuntimeError while the stream is running, or if it has failed."""
        answer = None if self._generation.thread.is_alive() else self._generation.answer
        if answer is None:
            raise RuntimeError(
                "no answer: this stream is running (read it to its end, or close() it), has failed, or was closed early"
            )
        return answer

    @property
    def report(self) -> Report:
        """The answer's report; see `answer`."""
        return self.answer.report

    def close(self) -> None:
        """Stops generation and waits until its documents are given back."""
        self._generation.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
