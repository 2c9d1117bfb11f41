"""A rank's pool of compiled documents: what its layers had in vLLM's cache, token by token, in blocks.

Behind a document's tokens is what it does to the states of linear layers, as bytes in as many rows as that takes.
Which block holds which document is known to the manager in front alone (`comb_serving.manager`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from comb.linktokens.front import LearnedFront
from comb_serving.encoding.kept import KeptDocuments
from comb_serving.pool.capability import PoolHandle
from comb_serving.vllm.linking.cache_access import (
    CacheReader,
    TokenCodes,
    cached_layers,
    linear_layers,
    token_shape,
    write,
)
from comb_serving.vllm.linking.links import Blocks, LinkingMetadata, LoadCommand
from comb_serving.vllm.linking.looks import QueryLooks
from comb_serving.vllm.linking.positions import find_positions
from comb_serving.vllm.linking.setup import method_of
from comb_serving.vllm.linking.states import DocumentStates

logger = logging.getLogger(__name__)


class DocumentPool:
    """Made when the model is loaded, before vLLM measures what memory is left for its cache.

    Args:
        total_bytes: that the pools of all `ranks` together may take.
        block_size: tokens in a block of the pool.
        front_tokens: of an adapter's link tokens, which lie behind the blocks like a document (`put_front`).

    Attributes:
        states: of the model's linear layers; None where they aren't linked.
        rows: [slots, width of all layers], each layer's in its `columns`, as vLLM's cache has them.
        kept: where documents are kept that have left it.
        looks: where what questions look at is to be heard.

    Raises:
        ValueError: for a model whose documents can't be moved, or if not even one block fits.
        OSError: if there is no room for it.
    """

    def __init__(
        self, model: Any, vllm_config: Any, *, total_bytes: int, ranks: int, block_size: int, front_tokens: int = 0
    ) -> None:
        method, dtype = method_of(vllm_config), vllm_config.model_config.dtype
        self.layers = cached_layers(vllm_config, states=method.states)
        self.states = DocumentStates(linear_layers(vllm_config)) if method.states else None
        self.positions = find_positions(model, self.layers, vllm_config)
        self.looks = QueryLooks(self.layers, self._cache_slots, self._cached_keys) if method.rule.by_query else None
        self.kept: KeptDocuments | None = None
        self.codes = {layer: TokenCodes.of(layer, dtype) for layer in self.layers.values()}
        self.columns: dict[str, slice] = {}
        stored, width = {codes.stored for codes in self.codes.values()}, 0
        if len(stored) > 1:
            raise ValueError("documents are linked in caches of one dtype, not with some layers in fp8")
        for name, layer in self.layers.items():
            self.columns[name] = slice(width, width := width + token_shape(layer).width)
        kind = stored.pop()
        self.bytes_per_token = width * kind.itemsize
        size = self.bytes_per_token * block_size * ranks
        if total_bytes < size:
            raise ValueError(f"a pool of {total_bytes} bytes is less than one block of {block_size} tokens, {size}")
        self.num_blocks, self.block_size, self.device = total_bytes // size, block_size, next(model.parameters()).device
        try:
            slots = self.num_blocks * block_size + (front_tokens and front_tokens + self.state_rows)
            self.rows = torch.empty(slots, width, dtype=kind, device=self.device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise OSError(
                f"no room for a pool of {self.num_blocks} blocks of {block_size} tokens on {self.device}: make "
                f"--comb-pool-bytes smaller ({error})"
            ) from error
        if self.state_rows >= self.num_blocks * block_size:
            raise ValueError(
                f"a pool of {total_bytes} bytes doesn't hold the states of one document, "
                f"{self.state_rows * self.bytes_per_token * ranks}: make --comb-pool-bytes larger"
            )
        self._caches: dict[str, tuple[int, CacheReader]] = {}  # of each layer: its cache group, and what reads it

    @torch.no_grad()
    def put_front(self, front: LearnedFront, rank: int, ranks: int) -> None:
        """An adapter's link tokens, of which a rank of tensor parallelism keeps the heads that its layers have.

        Raises:
            ValueError: for another number of layers, heads or channels.
        """
        key_values = front(torch.float32)
        if len(key_values) != len(self.layers):
            raise ValueError(
                f"the adapter's link tokens are for {len(key_values)} layers, this model has {len(self.layers)}"
            )
        rows = self.rows[self.num_blocks * self.block_size :]
        if self.states is not None:
            rows[front.length :] = self._as_rows(self.states.given(front))
            rows = rows[: front.length]
        for (name, layer), pair in zip(self.layers.items(), key_values, strict=True):
            shape = token_shape(layer)
            for place, (mine, given) in enumerate(zip(shape.split(rows[:, self.columns[name]]), pair, strict=True)):
                # fewer heads than ranks are had by several of them
                heads, first = mine.shape[1], rank * len(given) // ranks
                part = given[first : first + heads].transpose(0, 1)
                if part.shape != mine.shape or heads != max(1, len(given) // ranks):
                    raise ValueError(
                        f"{name} caches {list(mine.shape[1:])} numbers a token on each of {ranks} ranks, and the "
                        f"adapter's link tokens have {[len(given), given.shape[2]]}: they can't be linked in vLLM"
                    )
                mine.copy_(self.codes[layer].codes(part, place))

    def front_digest(self) -> str:
        """Of this rank's link tokens, as a part of documents' keys; empty where it has none."""
        rows = self.rows[self.num_blocks * self.block_size :].cpu()
        return f"+{sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}" if len(rows) else ""

    @property
    def dtype_name(self) -> str:
        """Of what it holds: the model's, or vLLM's name for an fp8 cache; and of the columns of linear layers."""
        layer, codes = next(iter(self.codes.items()))
        rows = str(codes.dtype).removeprefix("torch.") if codes.fp8 is None else str(layer.kv_cache_dtype)
        columns = {str(each.columns_dtype) for each in (self.states.layers.values() if self.states else ())}
        return "+".join([rows, *sorted(columns)])

    @property
    def state_rows(self) -> int:
        """Rows behind the tokens of each document."""
        return 0 if self.states is None else -(-self.states.nbytes // self.bytes_per_token)

    def attach(self, groups: Sequence[Any]) -> None:
        """vLLM's cache is there, in these groups of layers: where it keeps what is found out, or ends the start."""
        numbers = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        readers: dict[int, CacheReader] = {}  # by tokens in a block
        for name, layer in self.layers.items():
            size = groups[numbers[name]].kv_cache_spec.block_size
            reader = readers.setdefault(size, CacheReader(size, self.codes))
            reader.read(layer, torch.zeros(1, dtype=torch.long, device=self.device))
            self._caches[name] = numbers[name], reader
        if self.states is not None:
            self.states.attach(numbers)

    def close(self) -> None:
        """Documents on their way to the disk get there."""
        if self.kept is not None:
            self.kept.close()
            self.kept = None
        if self.states is not None:
            self.states.close()
        if self.looks is not None:
            self.looks.close()

    @torch.inference_mode()
    def before_step(self, metadata: LinkingMetadata) -> None:
        """Documents go into the blocks of requests."""
        if metadata.loads:
            self.load(metadata.loads)
        if self.states is not None:
            for compose in metadata.composes:
                self.states.compose(compose, self._read_states(compose.handle))
            self.states.listen(metadata.captures)
        if self.looks is not None:
            self.looks.listen(metadata.looks, metadata.looking)

    @torch.inference_mode()
    def after_step(self, metadata: LinkingMetadata) -> None:
        """What was computed of documents goes into the pool: out of vLLM's cache, and what its scans have said."""
        for capture in metadata.captures:
            assert self.states is not None
            memory = self._read_states(capture.handle)
            self.states.capture(capture, memory)
            self.rows[self._slots(capture.handle, capture.handle.tokens, self.state_rows)] = self._as_rows(memory)
        for save in metadata.saves:
            start, tokens = save.start, save.handle.tokens
            target = self._slots(save.handle, 0, tokens)
            for name, layer in self.layers.items():
                source = self._cache_slots(name, save.blocks, start, start + tokens)
                self.rows[target, self.columns[name]] = self._caches[name][1].read(layer, source)
            if save.stateless and self.states is not None:
                self.rows[self._slots(save.handle, tokens, self.state_rows)] = 0
            if self.kept is not None:
                self.kept.keep(save.key, self.rows[self._slots(save.handle, 0, tokens + self.state_rows)])

    @torch.inference_mode()
    def chosen(self) -> dict[str, list[int]]:
        """What the questions of the step have chosen, by request."""
        return {} if self.looks is None else self.looks.chosen()

    @torch.inference_mode()
    def fetch(self, key: str, handle: PoolHandle) -> str | None:
        """Copies a document into the pool from the tier that still has it; None if none has, or nothing of use."""
        found = None if self.kept is None else self.kept.fetch(key)
        rows = handle.tokens + self.state_rows
        if found is None or found[0].shape != (rows, self.rows.shape[1]) or found[0].dtype != self.rows.dtype:
            return None
        self.rows[self._slots(handle, 0, rows)] = found[0].to(self.device)
        if self.states is not None and (damage := self.states.damaged(self._read_states(handle))):
            logger.warning("document %s is compiled again: %s", key[:12], damage)
            return None
        return found[1]

    @torch.inference_mode()
    def load(self, commands: Sequence[LoadCommand]) -> None:
        """Copies documents into vLLM's cache, keys re-rotated to where they stand now; one write for each layer."""
        sources, compiled, linked = [], [], []
        for load in commands:
            tokens = load.end - load.start
            sources.append(self._slots(load.handle, load.offset, tokens))
            begin = load.compiled + load.offset
            compiled.append(torch.arange(begin, begin + tokens, device=self.device))
            linked.append(torch.arange(load.start, load.end, device=self.device))
        source, targets = torch.cat(sources), {}
        turn = self.positions.rerotation(torch.cat(compiled), torch.cat(linked))
        for name, layer in self.layers.items():
            group, reader = self._caches[name]
            if group not in targets:  # its layers have the same
                slots = [self._cache_slots(name, load.blocks, load.start, load.end) for load in commands]
                targets[group] = torch.cat(slots)
            shape, codes = token_shape(layer), self.codes[layer]
            rows = self.rows[:, self.columns[name]].index_select(0, source)  # rows at once, not numbers
            parts = shape.split(rows)
            keys = codes.numbers(parts[shape.rotated], shape.rotated)
            turn.apply(keys, self.positions.layers[name])
            if codes.fp8 is None:
                write(layer, parts[0], parts[1], targets[group])
            else:
                parts[shape.rotated].copy_(codes.codes(keys, shape.rotated))
                reader.write_codes(layer, rows, targets[group])

    def _read_states(self, handle: PoolHandle) -> Tensor:
        """A copy of a document's bytes behind its tokens."""
        assert self.states is not None
        rows = self.rows[self._slots(handle, handle.tokens, self.state_rows)]
        return rows.view(torch.uint8).flatten()[: self.states.nbytes]

    def _as_rows(self, memory: Tensor) -> Tensor:
        """A document's bytes [nbytes] as they lie behind its tokens [state_rows, width]."""
        rows = torch.zeros(self.state_rows * self.bytes_per_token, dtype=torch.uint8, device=memory.device)
        rows[: len(memory)] = memory
        return rows.view(self.rows.dtype).view(self.state_rows, -1)

    def _slots(self, handle: PoolHandle, offset: int, tokens: int) -> Tensor:
        places = torch.arange(offset, offset + tokens, device=self.device)
        blocks = torch.tensor(handle.blocks, device=self.device)
        return blocks[places // self.block_size] * self.block_size + places % self.block_size

    def _cached_keys(self, name: str, slots: Tensor) -> Tensor:
        layer, shape = self.layers[name], token_shape(self.layers[name])
        read = shape.split(self._caches[name][1].read(layer, slots))
        return self.codes[layer].numbers(read[shape.rotated], shape.rotated)

    def _cache_slots(self, name: str, blocks: Blocks, start: int, end: int) -> Tensor:
        (group, reader), places = self._caches[name], torch.arange(start, end, device=self.device)
        size = reader.block_size
        return torch.tensor(blocks[group], device=self.device)[places // size] * size + places % size
