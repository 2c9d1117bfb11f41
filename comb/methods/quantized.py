"""Any method with its PICaches in eight or four bits: quantised when compiled, dequantised when linked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from comb.cache.picache import PICache
from comb.cache.quantization import QuantizedPICache, check_scheme, quantize_picache
from comb.methods.base import DecodeState, LinkRequest, Method
from comb.methods.past_state import PastState


class Quantized(Method):
    """Wraps a method; written as a parameter of it, ``legolink:16,quantize=int8``.

    The store, disk and bytes are those of the quantised PICaches. Linking dequantises, so the prompt being linked needs
    as much memory as ever.

    Raises:
        ValueError: for an unknown scheme, or a method that has nothing to quantise.
    """

    def __init__(self, method: Method, scheme: str) -> None:
        super().__init__(method.model)
        self.scheme = check_scheme(scheme)
        if method.unquantizable:
            raise ValueError(
                f"method {method.name!r} can't be quantised: it {method.unquantizable}; leave out quantize={scheme}"
            )
        self.method = method
        self.name = method.name  # type: ignore[misc]  # a wrapper has its method's name and traits
        self.uses_encoder = method.uses_encoder  # type: ignore[misc]
        self.compile_name = method.compile_name  # type: ignore[misc]

    @property
    def fingerprint(self) -> str:
        return f"{self.method.fingerprint}/{self.scheme}"

    @property
    def compiled_behind(self) -> Sequence[int]:
        return self.method.compiled_behind

    @property
    def max_segment_tokens(self) -> int | None:
        return self.method.max_segment_tokens

    @property
    def max_prompt_tokens(self) -> int | None:
        return self.method.max_prompt_tokens

    @property
    def batches(self) -> bool:
        return self.method.batches

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        fingerprint = self.fingerprint
        return [quantize_picache(picache, self.scheme, fingerprint) for picache in self.method.compile(segments)]

    def link_row(self, row: LinkRequest) -> DecodeState:
        return self.method.link_row(self._dequantized(row))

    def link_batch(self, rows: Sequence[LinkRequest]) -> DecodeState:
        return self.method.link_batch([self._dequantized(row) for row in rows])

    def why_not_continue(self) -> str:
        return self.method.why_not_continue()

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        return self.method.continue_row(past, self._dequantized(row))

    def _dequantized(self, row: LinkRequest) -> LinkRequest:
        return replace(row, picaches=[self._open(picache) for picache in row.picaches])

    def _open(self, picache: PICache) -> PICache:
        if not isinstance(picache, QuantizedPICache) or picache.fingerprint != self.fingerprint:
            raise ValueError(
                f"method '{self.name}' with quantize={self.scheme} links what it compiled itself, got {picache!r}, "
                f"expected fingerprint {self.fingerprint}: compile the document again"
            )
        return picache.dequantize(self.method.fingerprint)
