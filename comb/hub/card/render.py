"""The generated card: header values for the Hub and the Markdown between the markers, from one template."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from comb.backbones.loading import backbones, is_hub_id
from comb.hub.card.facts import Training, eval_results, read_evaluations, read_training
from comb.hub.card.licence import Licence
from comb.hub.card.parts import BEGIN, END, Card, parse_card

# a wheel carries the template inside the package (pyproject.toml), a source tree has it in model_cards/
_PLACES = (Path(__file__).parent / "template.md", Path(__file__).parents[3] / "model_cards" / "template.md")
TEMPLATE = next((path for path in _PLACES if path.is_file()), _PLACES[0])

# argument of the card -> what a table cell says of TrainConfig's values
_SETTINGS = {
    "learning_rate": "peak learning rate {}", "batch_size": "{} questions per batch and rank",
    "gradient_accumulation_steps": "{} batches per step", "weight_decay": "weight decay {}",
    "lora_rank": "LoRA of rank {} on the encoder, merged",
}  # fmt: skip


def render(config: Any, folder: Path, repo: str, licence: Licence, dtype: str | None, parameters: int | None) -> Card:
    """The card of an adapter as it is before anybody edits it, with what `comb train` and `comb eval` left beside it.

    Args:
        dtype: of the adapter's weights, and so of its cache; `parameters` is their number.

    Raises:
        ValueError: if a record in `folder` is damaged.
    """
    training, evaluations = read_training(folder), read_evaluations(folder)
    encoder: Any = config.encoder_config
    backbone = config.backbone_name_or_path
    layers = config.cross_attention_layers or []
    dtype = str(dtype).removeprefix("torch.")
    title = repo.split("/")[-1]
    results = eval_results(evaluations)
    trained_on = [found for _, found in (training.datasets if training else ()) if found is not None]
    card: ModelCard = ModelCard.from_template(
        ModelCardData(
            library_name="comb",
            pipeline_tag="text-generation",
            # the Hub links an adapter to its backbone by this field, which must be a Hub id
            base_model=backbone if is_hub_id(backbone) else None,
            base_model_relation="adapter" if is_hub_id(backbone) else None,
            datasets=list(dict.fromkeys(trained_on)) or None,
            tags=["comb", "position-independent-caching", "kv-cache", "rag"],
            metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
            model_name=title if results else None,
            eval_results=results or None,
            **licence.header,
        ),
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        begin=BEGIN, end=END, title=title, repo=repo, backbone=backbone,
        linked=is_hub_id(backbone), bundled=backbone in backbones,
        revision=config.backbone_revision, model_type=config.get_text_config().model_type, licence=licence,
        encoder=encoder, cross_layers=layers, dtype=dtype, parameters=parameters,
        bytes_per_token=2 * len(layers) * encoder.num_key_value_heads * encoder.head_dim * _itemsize(dtype),
        training=training, settings=_settings(training), evaluations=evaluations, serves=_serves(),
    )  # fmt: skip
    return parse_card(card.content, str(TEMPLATE))


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _settings(training: Training | None) -> list[str]:
    options = training.options if training else {}
    given = [text.format(options[name]) for name, text in _SETTINGS.items() if options.get(name) is not None]
    return [text for text in given if text != "1 batches per step"]


def _serves() -> bool:
    """Whether this installation has `comb serve`."""
    return any(entry.name == "serving" for entry in metadata.entry_points(group="comb.commands"))
