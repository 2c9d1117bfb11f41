"""Rotary embeddings as a model computes them: cosines and sines are asked of the modules that return them.

Buffers don't say what a module does with them: LongRoPE has other frequencies and magnitudes beyond a length, dynamic
NTK others at every length, and some modules compute their own in every pass. Shapes: T tokens, m rotated pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from comb.backbones.discovery import position_count
from comb.backbones.forward import cache_argument, cache_in, decoder_of, takes_positions
from comb.backbones.identity import exclusive, modules_now
from comb.waits import on_device

Turns = tuple[Tensor, Tensor]
"""Cosines and sines [T, m], multiplied by the embedding's magnitude (YaRN's attention factor)."""

_FEW = (0, 1, 2)
_found: WeakKeyDictionary[Any, tuple[RotaryEmbedding, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class RotaryEmbedding:
    """What one rotary embedding of a model gives tokens for their positions.

    Args:
        ask: the turns of a pass over tokens at positions [T], in float32 or more.
        limit: positions of a pass up to which their number changes nothing; None where it never does.
        module: that is asked; None for a formula.
        counts: whether it goes by the number of tokens in a pass, whatever their positions are.
    """

    ask: Callable[[Tensor], Turns]
    limit: int | None = None
    module: nn.Module | None = None
    counts: bool = False

    def turns(self, positions: Tensor, length: int) -> Turns:
        """Of tokens at `positions` [T], in a pass that ends at position `length` - 1."""
        if self.limit is None:
            return self.ask(positions)
        self.settle(length)
        cos, sin = self.ask(torch.cat([positions, positions.new_tensor([length - 1])]))
        return cos[:-1], sin[:-1]

    def settle(self, length: int) -> None:
        """Puts an embedding that keeps the longest pass in mind to where one over `length` tokens leaves a new one."""
        if self.limit is not None:
            for last in (0, length - 1):
                self.ask(torch.tensor([last]))


def rotary_embeddings(model: Any) -> tuple[RotaryEmbedding, ...]:
    """What the modules return that `model` calls with positions, found by one pass as long as they are its own.

    Empty where no module does: attention that has its own table of sines, positions that aren't rotary, none at all.
    """
    found = _found.get(model)
    if found is None or not {id(each.module) for each in found} <= {id(module) for module in modules_now(model)}:
        found = _found[model] = tuple(_returned(model))
    return found


def length_limit(model: Any) -> int | None:
    """Positions of a pass up to which their number changes no key; None where it never does."""
    return min((each.limit for each in rotary_embeddings(model) if each.limit is not None), default=None)


def prompt_limit(model: Any) -> int | None:
    """Tokens that a prompt may have; None when the model's configuration names no limit."""
    config = model.config.get_text_config(decoder=True)
    limit, rope = position_count(config), getattr(config, "rope_parameters", None) or {}
    if limit is None:
        return None
    # dynamic NTK keeps the trained length there and stretches beyond it
    return int(limit * rope.get("factor", 1.0)) if rope.get("rope_type") == "dynamic" else limit


def compile_limit(model: Any) -> int | None:
    """Positions that a segment is compiled in, with what stands in front of it; None where any number is right."""
    return min((limit for limit in (prompt_limit(model), length_limit(model)) if limit is not None), default=None)


def front_limit(config: Any) -> int | None:
    """Tokens of a front that leave half of `compile_limit` to segments, by a model's configuration: a server and a
    plan for a training load no weights, and compile behind the same. Of the embeddings that transformers has, dynamic
    NTK and LongRoPE change with the length of a pass."""
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [position_count(config)]
    for each in [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]:
        if each.get("rope_type") == "longrope":
            original = each.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None))
    known = [limit for limit in limits if limit is not None]
    return min(known) // 2 if known else None


def settle(model: Any, length: int) -> None:
    """Before a prompt of `length` tokens: another may have left an embedding with its own, longer reach."""
    for embedding in rotary_embeddings(model):
        embedding.settle(length)
    for module in modules_now(model):
        # how far the last prompt's pictures moved its text, or the zeros of its rows
        if vars(module).get("rope_deltas") is not None:
            vars(module)["rope_deltas"] = None


def drops_cache(model: Any, tokens: int, covered: int) -> bool:
    """Whether `generate` gives up a cache of `covered` tokens before a pass that brings the sequence to `tokens`."""
    cache, held = DynamicCache(), torch.zeros(1).expand(1, 1, covered, 1)
    cache.update(held, held, 0)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    given = {cache_argument(model): cache, "attention_mask": torch.ones_like(ids)}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=tokens - covered, **given)
    return cache_in(inputs) is None


def why_length_dependent(model: Any) -> str:
    """Says so if a model's rotary embedding changes all keys with the length of the prompt; empty if not."""
    if (limit := length_limit(model)) is None:
        return ""
    return f"its rotary embedding changes all keys with the length of the prompt, beyond {limit} tokens"


def tabulated_embeddings(model: Any) -> list[RotaryEmbedding]:
    """Guesses for attention that turns keys by itself: inverse frequencies in buffers, or as GPT-J computes them."""
    found = [
        buffer.detach().double()
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and buffer.ndim == 1
    ]
    if not found:  # models that keep a table of sines (GPT-J, CodeGen): base 10000 over their rotary width
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", None)
        widths = {getattr(config, "rotary_dim", None), getattr(config, "head_dim", None)}
        if heads and getattr(config, "hidden_size", None):
            widths.add(config.hidden_size // heads)
        for width in sorted(width for width in widths if isinstance(width, int) and width > 1):
            exponents = torch.arange(0, width, 2, dtype=torch.int64) / width
            found.append((1.0 / 10_000**exponents).double())
    distinct: list[Tensor] = []
    for frequencies in found:
        if not any(torch.equal(frequencies, other) for other in distinct):
            distinct.append(frequencies)
    return [RotaryEmbedding(partial(_by_frequency, frequencies)) for frequencies in distinct]


def _by_frequency(frequencies: Tensor, positions: Tensor) -> Turns:
    angles = positions.double()[:, None] * frequencies.to(positions.device)
    return angles.cos(), angles.sin()


def embedding_of(module: nn.Module, longest: int) -> RotaryEmbedding | None:
    """Of a module that is called as transformers calls its own, over `longest` positions; None for any other."""
    where = torch.zeros(1, 1, dtype=torch.long)
    try:
        return _Call(module, (_argument(torch.zeros(1, 1, 1), where), _argument(where, where)), {}).embedding(longest)
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None


@torch.no_grad()
def _returned(model: Any) -> Iterator[RotaryEmbedding]:
    if not takes_positions(model) or any(parameter.is_meta for parameter in model.parameters()):
        return
    where = torch.tensor([_FEW], device=model.get_input_embeddings().weight.device)
    calls: list[_Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        turns = _pair(output, where.shape[1])
        if turns is not None and _turn(*turns) and any(_is(where, each) for each in (*args, *kwargs.values())):
            named = {name: _argument(each, where) for name, each in kwargs.items()}
            calls.append(_Call(module, tuple(_argument(each, where) for each in args), named))

    with exclusive(model):
        handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
        try:
            decoder_of(model)(input_ids=torch.ones_like(where), position_ids=where, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        longest = position_count(model.config.get_text_config(decoder=True)) or 2**17
        distinct: list[tuple[int | None, Turns]] = []
        for call in calls:
            embedding = call.embedding(longest)
            # the same in every layer of some models
            seen = embedding.limit, embedding.turns(torch.tensor(_FEW), (embedding.limit or 2) + 1)
            if not any(seen[0] == limit and _same(seen[1], turns) for limit, turns in distinct):
                distinct.append(seen)
                yield embedding


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a module, to be made with other positions.

    Args:
        args, kwargs: that give its arguments for positions [T].
        each: the channels in which the turns of all pairs are, each once.
    """

    module: nn.Module
    args: tuple[Callable[[Tensor], Any], ...]
    kwargs: dict[str, Callable[[Tensor], Any]]
    each: slice = field(default_factory=lambda: slice(None))

    def __call__(self, positions: Tensor) -> Turns:
        tensors = (*self.module.buffers(), *self.module.parameters())
        positions = on_device(positions, next((tensor.device for tensor in tensors), positions.device))
        args = [argument(positions) for argument in self.args]
        kwargs = {name: argument(positions) for name, argument in self.kwargs.items()}
        found = _pair(self.module(*args, **kwargs), len(positions))
        assert found is not None
        return found[0][:, self.each], found[1][:, self.each]

    def embedding(self, longest: int) -> RotaryEmbedding:
        """What the module is, for a model of so many positions."""
        cos, sin = self(torch.tensor(_FEW))
        half = cos.shape[-1] // 2
        # a module gives each pair one angle, or each channel of the pair: by halves (Llama) or by neighbours (Cohere)
        for first, second in ((slice(half), slice(half, None)), (slice(None, None, 2), slice(1, None, 2))):
            if torch.equal(cos[:, first], cos[:, second]) and torch.equal(sin[:, first], sin[:, second]):
                each = first
                break
        else:
            each = slice(None)
        call = replace(self, each=each)
        # of a copy, since positions that a table doesn't have end a process on a GPU
        config = getattr(self.module, "config", None)  # which may hold what can't be copied
        twin = replace(call, module=copy.deepcopy(self.module, {id(config): config}).to("cpu"))
        try:
            twin(torch.tensor(_FEW))
        except RuntimeError:  # accelerate's hooks send its arguments to another device
            twin = call
        return RotaryEmbedding(call, _limit(twin, 2 * longest), self.module, _counts(twin, min(2 * longest, 2**16)))


def _first_turns(ask: Callable[[Tensor], Turns], positions: Tensor) -> Turns | None:
    """Of the first few positions, in a pass over more; None for one that is longer than a module's table."""
    try:
        ask(torch.tensor([0]))  # modules that keep the longest pass in mind forget it
        cos, sin = ask(positions)
    except (IndexError, RuntimeError, ValueError, AssertionError):
        return None
    return cos[: len(_FEW)], sin[: len(_FEW)]


def _limit(ask: Callable[[Tensor], Turns], most: int) -> int | None:
    """The number of positions, up to `most`, beyond which the first few get other turns."""

    def first(length: int) -> Turns | None:
        return _first_turns(ask, torch.tensor([*_FEW, length - 1]))

    same, other = len(_FEW) + 1, None
    if (short := first(same)) is None:
        return None
    for exponent in range(3, most.bit_length() + 1):
        if (turns := first(2**exponent)) is None:
            return None
        if not _same(turns, short):
            other = 2**exponent
            break
        same = 2**exponent
    if other is None:
        return None
    while other - same > 1:
        middle = (same + other) // 2
        turns = first(middle)
        if turns is not None and _same(turns, short):
            same = middle
        else:
            other = middle
    return same


def _counts(ask: Callable[[Tensor], Turns], length: int) -> bool:
    """Whether the first few of so many tokens get other turns than they do beside the last one alone."""
    among = _first_turns(ask, torch.arange(length))
    beside = _first_turns(ask, torch.tensor([*_FEW, length - 1]))
    if among is None or beside is None:
        return False
    return not all(torch.allclose(one, other, atol=1e-5) for one, other in zip(among, beside, strict=True))


def _pair(output: Any, tokens: int) -> Turns | None:
    """Cosines and sines [tokens, .] in what a module returned: two tensors, or a complex one; None where it isn't."""
    if isinstance(output, Tensor) and output.is_complex():
        output = output.real, output.imag
    if not isinstance(output, tuple | list) or len(output) != 2:
        return None
    if not all(isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= 2 for part in output):
        return None
    width = output[0].shape[-1]
    if output[0].shape != output[1].shape or not width or output[0].numel() % (tokens * width):
        return None
    cos, sin = (part.detach().reshape(-1, tokens, width)[0] for part in output)
    return cos, sin


def _turn(cos: Tensor, sin: Tensor) -> bool:
    """Whether these are of angles that begin at zero, up to 16-bit rounding."""
    size = (cos.float().square() + sin.float().square()).sqrt()
    least = 2e-2 * float(size.max())
    return least > 0 and float((size - size[:1]).abs().max()) <= least and float(sin[0].abs().max()) <= least


def _is(where: Tensor, given: Any) -> bool:
    """Whether an argument is the positions `where` [1, T], once or once for every axis of an image."""
    if not isinstance(given, Tensor) or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        return False
    fits = given.ndim >= 1 and given.shape[-1] == where.shape[1]
    return fits and bool((given.to(where.device) == where).all())


def _argument(given: Any, where: Tensor) -> Callable[[Tensor], Any]:
    """From an argument of a pass over `where` [1, T], what gives that of a pass over other positions [T]."""
    if _is(where, given):
        return lambda positions: positions.expand(*given.shape[:-1], len(positions))
    if not isinstance(given, Tensor) or not given.is_floating_point():
        return lambda _: given
    # hidden states, of which a module reads dtype and device; in float32 what is returned isn't rounded to 16 bits
    axes, width, dtype = max(given.ndim - 2, 0), given.shape[-1], torch.promote_types(given.dtype, torch.float32)

    def hidden(positions: Tensor) -> Tensor:
        return torch.zeros(1, dtype=dtype, device=positions.device).expand(*(1,) * axes, len(positions), width)

    return hidden


def _same(one: Turns, other: Turns) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
