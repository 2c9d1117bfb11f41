"""What `comb serve` looks at before it starts anything: an error of a server takes longer and is longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from comb.backbones.adapter import is_adapter
from comb.backbones.damage import check_settings
from comb.backbones.loading import backbone_of_adapter, load_config, resolve_name
from comb.backbones.settings import PEFT
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.files import read_json
from comb.linktokens.config import LinkTokensConfig
from comb.methods.fronts import DUMMIES
from comb.model.config import CombConfig
from comb_serving.linking.methods import ADAPTER, FULL, TRAINED, LinkMethod

_OTHER_TOKENIZERS = ("--tokenizer", "--skip-tokenizer", "--trust-remote-code", "--config-format", "--load-format")


@dataclass(frozen=True)
class Start:
    """What a server is started with.

    Args:
        method: that a plain model links documents with; None: the checkpoint is an adapter with an encoder.
        backbone: where the adapter's backbone is, if that isn't for the checkpoint to say.
        link_tokens: the adapter whose link tokens stand in front of documents, on `backbone`.
    """

    method: str | None
    backbone: str | None = None
    link_tokens: str | None = None


def check_start(checkpoint: str, method: str | None = None, backbone: str | None = None) -> Start:
    """Whether vLLM is installed and `checkpoint` is what its method needs; its weights are not looked at.

    Args:
        checkpoint: of an adapter: folder or Hub id; of a plain model also a registered name or a GGUF file.
        method: None for an adapter; for a plain model how documents are linked.
        backbone: where the adapter's backbone is, if not where the adapter says.

    Raises:
        ValueError: if not, saying what to do.
        OSError: if the checkpoint's configuration can't be read.
    """
    if find_spec("vllm") is None:
        raise ValueError("comb serve needs vLLM, which is not installed: pip install 'comb-pic[serve]'")
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
    if config.get("model_type") == LinkTokensConfig.model_type:
        return _of_link_tokens(checkpoint, load_config(name), method, backbone)
    front = "none" if method is None else LinkMethod.parse(method).front
    if front == ADAPTER:
        raise ValueError(
            f"{checkpoint!r} is no adapter of link tokens, its model_type is {config.get('model_type')!r}: train some "
            "with `comb train configs/linktokens-smollm2-135m.yaml`, or link documents with --method primed"
        )
    adapter = config.get("model_type") == CombConfig.model_type
    if not adapter and method is None:
        raise ValueError(
            f"{checkpoint!r} is no COMB adapter, its model_type is {config.get('model_type')!r}: link documents in a "
            f"plain model with `comb serve {checkpoint} --method legolink:16`, or put an encoder on it with `comb "
            "train` or CombForCausalLM.from_backbone"
        )
    if adapter and method is not None:
        raise ValueError(
            f"{checkpoint!r} is a COMB adapter, whose encoder is its method: leave --method away, or serve the plain "
            f"model that it belongs to, {config.get('backbone_name_or_path')!r}"
        )
    if backbone is not None and not adapter:
        raise ValueError("--backbone is for adapters, and this is a plain model: leave it away")
    if method is None or front in ("none", "prose") or front.startswith(DUMMIES):
        return Start(method, backbone)
    # another adapter's folder or Hub id; clients are not told where it is
    if not isinstance(load_config(front), LinkTokensConfig):
        raise ValueError(f"--method {method}: {front} is no adapter of link tokens, and no other front is served")
    return Start(method.replace(f"front={front}", f"front={ADAPTER}"), backbone, front)


def check_tokenizer_there(checkpoint: str, arguments: Sequence[str]) -> None:
    """Raises ValueError or OSError for a folder without a tokenizer that can be read.

    Args:
        arguments: of vLLM, which may name another one, or another way to read it.
    """
    name = resolve_name(checkpoint)
    if not Path(name).is_dir() or any(item.startswith(_OTHER_TOKENIZERS) for item in arguments):
        return
    config = load_config(name) if is_adapter(read_json(Path(name) / "config.json")) else None
    load_tokenizer(name, SimpleNamespace(config=config))


def _of_link_tokens(checkpoint: str, config: LinkTokensConfig, method: str | None, backbone: str | None) -> Start:
    if method not in (None, FULL) and LinkMethod.parse(method).front != ADAPTER:
        raise ValueError(
            f"{checkpoint!r} is an adapter of link tokens, which are its method: leave --method away, name one behind "
            f"them (legolink:4,front={ADAPTER}), or serve the plain model that it belongs to, "
            f"{config.backbone_name_or_path!r}"
        )
    if backbone is None:
        if config.backbone_revision is not None:
            raise ValueError(
                f"{checkpoint!r} belongs to revision {config.backbone_revision} of "
                f"{config.backbone_name_or_path!r}: name a folder that holds it with --backbone"
            )
        backbone = backbone_of_adapter(config, resolve_name(checkpoint))
    return Start(method or TRAINED, backbone, checkpoint)


def check_plain_options(given: Mapping[str, bool]) -> None:
    """Raises ValueError for options that mean nothing without an encoder, by name; `given`: whether each was."""
    for name in (name for name, was_given in given.items() if was_given):
        advice = "say --method full" if name == "--encoder" else "leave it away"
        raise ValueError(f"{name} is for adapters, and --method for plain models, which have no encoder: {advice}")
