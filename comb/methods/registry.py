"""The methods by name, as they are written: ``legolink:16``, ``focus:0.1,front=prose``, ``naive,quantize=int8``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from comb.backbones.identity import backbone_of
from comb.cache.picache import PICache
from comb.cache.quantization import SCHEMES, QuantizedPICache, quantize_picache
from comb.hybrid.caches import is_hybrid
from comb.methods.base import LinkRequest, Method, MethodSpec
from comb.methods.decode_state import DecodeState, PastState
from comb.registry import Registry

MethodClass = TypeVar("MethodClass", bound=type[Method])

registry: Registry[type[Method]] = Registry("method", "comb.methods")


def names() -> list[str]:
    """Names of all methods, sorted."""
    return registry.names()


def get(name: str) -> type[Method]:
    """The class of a method. Raises ValueError naming the known methods."""
    return registry.get(name)


def register(name: str) -> Callable[[MethodClass], MethodClass]:
    """Class decorator that adds a method under `name`. Raises ValueError if the name is taken."""

    def add(cls: MethodClass) -> MethodClass:
        # inherited names don't count: the name is part of every key
        if "name" not in cls.__dict__:
            cls.name = name
        registry.register(name)(cls)
        return cls

    return add


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits ``"legolink:16"``, ``"name:key=value,..."`` or ``"name,key=value"`` into a name and keyword parameters.

    Raises:
        ValueError: for an unknown name, more positional values than the method takes, or two values of a parameter.
    """

    def plain(text: str) -> Any:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    name, *rest = re.split("[:,]", spec, maxsplit=1)
    cls = get(name)
    parameters: dict[str, Any] = {}
    positional = list(cls.positional)
    for argument in rest[0].split(",") if rest else ():
        key, equals, value = argument.partition("=")
        if not key.strip():
            raise ValueError(f"method {spec!r}: a parameter is empty: write its value, or leave out the sign before it")
        if not equals:
            if not positional:
                taken = ", ".join(cls.positional) or "none"
                raise ValueError(
                    f"method {spec!r}: {name!r} has no unnamed parameter for {argument!r} (it takes: {taken}); "
                    "write name:key=value"
                )
            key, value = positional.pop(0), argument
        if (key := key.strip()) in parameters:
            raise ValueError(f"method {spec!r} says twice what {key} is")
        parameters[key] = plain(value.strip())
    return name, parameters


def split_specs(text: str) -> list[str]:
    """Splits ``"full,legolink:2,naive:rotate=false,quantize=int8"`` at the commas between methods.

    A part such as ``quantize=int8`` or ``front=dummies:4`` belongs to the method in front of it.
    """
    specs: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, _ = part.partition("=")
        if specs and equals and ":" not in name:
            specs[-1] += ("," if ":" in specs[-1] else ":") + part
        else:
            specs.append(part)
    return specs


def create(spec: str, model: Any, **options: Any) -> Method:
    """A method instance for `model` from ``"comb"`` or ``"legolink:16"``; `options` win over the spec's.

    Every method takes ``quantize=int8``, ``fp8`` or ``int4`` (`Quantized`).

    Raises:
        ValueError: for an unknown name or parameter, or when `model` lacks what the method needs.
    """
    name, parameters = parse(spec)
    options = {**parameters, **options}
    made_as = MethodSpec(name, dict(options))
    scheme = options.pop("quantize", None)
    cls = get(name)
    if cls.on_hybrids and is_hybrid(backbone_of(model)):
        options = {"front": getattr(cls, "default_front", "none"), **options}
        cls = get(cls.on_hybrids)
    method = cls(model, **options)
    if scheme not in (None, False, "none"):
        method = Quantized(method, scheme)  # type: ignore[assignment]  # registered as one
    method.spec = made_as
    return method


@Method.register
class Quantized:
    """Wraps a method, which is asked for all that isn't here; written as ``legolink:16,quantize=int8``.

    Linking dequantises, so the prompt being linked needs as much memory as ever.

    Raises:
        ValueError: for an unknown scheme, or a method that has nothing to quantise.
    """

    link, keys_of = Method.link, Method.keys_of  # over the fingerprint and `link_row` of the wrapper

    def __init__(self, method: Method, scheme: str) -> None:
        if not isinstance(scheme, str) or scheme not in SCHEMES:
            raise ValueError(f"quantize is one of {', '.join(SCHEMES)}, not {scheme!r}")
        self.method, self.scheme = method, scheme
        if method.unquantizable:
            raise ValueError(
                f"method {method.name!r} can't be quantised: it {method.unquantizable}; leave out quantize={scheme}"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("method"), name)  # there is none yet in a copy that is being made

    @property
    def fingerprint(self) -> str:
        return f"{self.method.fingerprint}/{self.scheme}"

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        fingerprint = self.fingerprint
        return [quantize_picache(picache, self.scheme, fingerprint) for picache in self.method.compile(segments)]

    def link_row(self, row: LinkRequest) -> DecodeState:
        return self.method.link_row(self._dequantized(row))

    def link_batch(self, rows: Sequence[LinkRequest]) -> DecodeState:
        return self.method.link_batch([self._dequantized(row) for row in rows])

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        return self.method.continue_row(past, self._dequantized(row))

    def _dequantized(self, row: LinkRequest) -> LinkRequest:
        fingerprint, plain, opened = self.fingerprint, self.method.fingerprint, list[PICache]()
        for picache in row.picaches:
            if not isinstance(picache, QuantizedPICache) or picache.fingerprint != fingerprint:
                raise ValueError(
                    f"method '{self.name}' with quantize={self.scheme} links what it compiled itself, got {picache!r}, "
                    f"expected fingerprint {fingerprint}: compile the document again"
                )
            opened.append(picache.dequantize(plain))
        return replace(row, picaches=opened)
