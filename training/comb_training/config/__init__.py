"""What a training run is to do: four sections of keys, checked as they are read.

YAML, nested values and ``section.key=value`` enter; a frozen `Config` leaves. A mistake is an error that names source,
key and what was expected. `Config.to_dict` is what training.json holds.
"""

from comb_training.config.read import config_from_dict, load_config, of_file, override, trained_config
from comb_training.config.sections import Config, DataConfig, MixtureEntry, ModelConfig, TrainConfig

__all__ = [
    "Config", "DataConfig", "MixtureEntry", "ModelConfig", "TrainConfig", "config_from_dict", "load_config", "of_file",
    "override", "trained_config",
]  # fmt: skip
