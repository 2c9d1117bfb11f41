"""What `comb serve` looks at before it starts anything: an error of a server takes longer and is longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from comb.backbones.adapter import is_adapter
from comb.backbones.damage import PEFT, check_settings
from comb.backbones.loading import backbone_of_adapter, load_config, resolve_name, trained_quantised
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.found import check_sizes
from comb.files import read_json
from comb.hybrid.caches import describes_hybrid
from comb.linktokens.front import LinkTokensConfig
from comb.methods.fronts import DUMMIES
from comb.model.config import CombConfig
from comb.model.weights import check_checkpoint
from comb_serving.config.serve_options import ServeOptions
from comb_serving.linking.methods import ADAPTER, FULL, TRAINED, LinkMethod

_OTHER_TOKENIZERS = ("--tokenizer", "--skip-tokenizer", "--trust-remote-code", "--config-format", "--load-format")
PLAIN_METHOD = "primed"  # what documents of a plain model are linked by, as in the library
_OF_ENCODERS = ("encoder", "encoder_device", "pool_dtype", "pool_memory")


def check_start(options: ServeOptions, arguments: Sequence[str] = ()) -> ServeOptions:
    """The options with what the checkpoint decides: method, backbone and place of an adapter of link tokens.

    Args:
        arguments: of vLLM, which may name another tokenizer, or another way to read it.

    Raises:
        ValueError: if vLLM isn't installed or these don't go together, saying what to do.
        OSError: if the checkpoint can't be read.
    """
    if options.method is not None:
        options = replace(options, method=LinkMethod.parse(options.method).name)
    if find_spec("vllm") is None:
        raise ValueError("comb serve needs vLLM, which is not installed: pip install 'comb-pic[serve]'")
    settings = _settings(options.checkpoint)
    if is_adapter(settings):
        _check_read_alike(options)
    options = _of_kind(options, settings)
    if options.method is not None and _is_hybrid(options.model):
        options = replace(options, method=LinkMethod.parse(options.method).on_hybrids.name)
    check_checkpoint(options.checkpoint, options.backbone)
    name = resolve_name(options.checkpoint)
    if Path(name).is_dir() and not any(item.startswith(_OTHER_TOKENIZERS) for item in arguments):
        config = load_config(name) if is_adapter(read_json(Path(name) / "config.json")) else None
        load_tokenizer(name, SimpleNamespace(config=config))
    if options.disk_path is not None and Path(options.disk_path).exists() and not Path(options.disk_path).is_dir():
        raise ValueError(f"--comb-disk {options.disk_path} is a file: name a folder, which is made where there is none")
    if options.audit and options.method in (None, FULL):
        raise ValueError(
            "--audit compares documents that a plain model's --method links (primed, legolink:16, ...) with full "
            "recompute, and nothing is linked here"
        )
    if options.lora_documents != "own" and options.method in (None, FULL):
        raise ValueError(
            "--comb-lora says how a plain model's --method (primed, legolink:16, ...) compiles documents, and none is "
            "compiled here: leave it away"
        )
    if options.segments != "off":
        if options.method in (None, FULL) or LinkMethod.parse(options.method).states:
            raise ValueError(
                "--comb-segments finds text in a plain model's prompts for its --method to link (primed, legolink:16, "
                f"...), and not for {options.method or 'the encoder of an adapter'}"
            )
        check_sizes(options.segment_tokens, patterns=options.segment_patterns, kinds=options.segment_kinds)
    elif idle := options.given("segment_tokens", "segment_patterns", "segment_kinds"):
        raise ValueError(f"{idle[0]} is for --comb-segments auto, and no segments are found without: add that")
    for flag in options.given(*_OF_ENCODERS) if options.method is not None else ():
        advice = "say --method full" if flag == "--encoder" else "leave it away"
        raise ValueError(f"{flag} is for adapters, and --method for plain models, which have no encoder: {advice}")
    return options


def _settings(checkpoint: str) -> dict[str, Any]:
    """The checkpoint's configuration. Raises ValueError or OSError for one that can't be served, whatever is asked."""
    name = resolve_name(checkpoint)
    here = Path(name).exists()
    if not here and "/" not in name:  # no need to ask the Hub
        raise OSError(f"no checkpoint {checkpoint!r}: there is no such folder, and a Hub id is owner/name")
    if here:
        check_settings(Path(name))
        if (Path(name) / PEFT).is_file() and not (Path(name) / "config.json").is_file():
            raise ValueError(
                f"{checkpoint!r} is a PEFT adapter ({PEFT}), not a model: merge it into its model (merge_and_unload, "
                "then save_pretrained) and serve that"
            )
    try:
        config, _ = CombConfig.get_config_dict(name)
    except OSError as error:
        reason = " ".join(str(error).split())  # transformers' own has several lines
        looked = "its configuration could not be read" if here else "there is no such folder, and as a Hub id"
        raise OSError(f"no checkpoint {checkpoint!r}: {looked}: {reason}") from error
    config.pop("_commit_hash", None)  # transformers before 5.18 adds it to an empty one too
    if not config:
        raise OSError(f"no checkpoint {checkpoint!r}: it holds no config.json, or an empty one")
    return dict(config)


def _is_hybrid(model: str) -> bool:
    try:
        return describes_hybrid(load_config(model))
    except (ImportError, OSError, ValueError):  # vLLM may know more models, and says what is wrong with others
        return False


def _check_read_alike(options: ServeOptions) -> None:
    """Raises ValueError for an adapter of a backbone that was quantised as it was loaded: vLLM would read it whole."""
    name = resolve_name(options.checkpoint)
    config = load_config(name)
    backbone = options.backbone or backbone_of_adapter(config, name)
    if trained_quantised(config, backbone) is not None:
        raise ValueError(
            f"{options.checkpoint!r} was trained on {backbone} quantised as it was loaded, which vLLM doesn't do "
            "alike: save the quantised backbone (save_pretrained), and give its folder as --backbone"
        )


def _of_kind(options: ServeOptions, config: dict[str, Any]) -> ServeOptions:
    """The options of such a checkpoint; raises ValueError where it isn't what they say."""
    checkpoint, method, kind = options.checkpoint, options.method, config.get("model_type")
    front = "none" if method is None else LinkMethod.parse(method).front
    if kind == LinkTokensConfig.model_type:
        known, backbone = load_config(resolve_name(checkpoint)), options.backbone
        if method not in (None, FULL) and front != ADAPTER:
            raise ValueError(
                f"{checkpoint!r} is an adapter of link tokens, which are its method: leave --method away, name one "
                f"behind them (legolink:4,front={ADAPTER}), or serve the plain model that it belongs to, "
                f"{known.backbone_name_or_path!r}"
            )
        if backbone is None:
            if known.backbone_revision is not None:
                raise ValueError(
                    f"{checkpoint!r} belongs to revision {known.backbone_revision} of "
                    f"{known.backbone_name_or_path!r}: name a folder that holds it with --backbone"
                )
            backbone = backbone_of_adapter(known, resolve_name(checkpoint))
        return replace(options, method=method or TRAINED, backbone=backbone, link_tokens=checkpoint)
    if front == ADAPTER:
        raise ValueError(
            f"{checkpoint!r} is no adapter of link tokens, its model_type is {kind!r}: train some with `comb train "
            "configs/linktokens-smollm2-135m.yaml`, or link documents with --method primed"
        )
    adapter = kind == CombConfig.model_type
    if not adapter and method is None:
        return _of_kind(replace(options, method=PLAIN_METHOD), config)
    if adapter and method is not None:
        raise ValueError(
            f"{checkpoint!r} is a COMB adapter, whose encoder is its method: leave --method away, or serve the plain "
            f"model that it belongs to, {config.get('backbone_name_or_path')!r}"
        )
    if options.backbone is not None and not adapter:
        raise ValueError("--backbone is for adapters, and this is a plain model: leave it away")
    if method is None or front in ("none", "prose") or front.startswith(DUMMIES):
        return options
    # another adapter's folder or Hub id; clients are not told where it is
    if not isinstance(load_config(front), LinkTokensConfig):
        raise ValueError(f"--method {method}: {front} is no adapter of link tokens, and no other front is served")
    return replace(options, method=method.replace(f"front={front}", f"front={ADAPTER}"), link_tokens=front)
