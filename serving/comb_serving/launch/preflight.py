"""What `comb serve` looks at before it starts anything: an error of a server takes longer and is longer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from comb.backbones.loading import resolve_name
from comb.model.config import CombConfig


def check_start(checkpoint: str) -> None:
    """Whether vLLM is installed and `checkpoint` (folder, Hub id) is an adapter; its weights are not looked at.

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
    try:
        config, _ = CombConfig.get_config_dict(name)
    except OSError as error:
        reason = " ".join(str(error).split())  # transformers' own has several lines
        looked = "its configuration could not be read" if here else "there is no such folder, and as a Hub id"
        raise OSError(f"no checkpoint {checkpoint!r}: {looked}: {reason}") from error
    config.pop("_commit_hash", None)  # transformers before 5.18 adds it to an empty one too
    if not config:
        raise OSError(f"no checkpoint {checkpoint!r}: it holds no config.json, or an empty one")
    if config.get("model_type") != CombConfig.model_type:
        raise ValueError(
            f"{checkpoint!r} is no COMB adapter, its model_type is {config.get('model_type')!r}: serve a plain "
            "backbone with `vllm serve`, or put an encoder on it with `comb train` or CombForCausalLM.from_backbone"
        )
