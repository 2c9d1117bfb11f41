"""The generated card: header values for the Hub and the Markdown between the markers, from one template."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from jinja2 import UndefinedError

from comb.backbones import backbones
from comb.backbones.fingerprint import fingerprint_name
from comb.backbones.loading import backbone_beside, is_hub_id, resolve_name
from comb.backbones.unpublished import public
from comb.hub.card.facts import RESULTS, TRAINING, eval_results, read_evaluations, read_training
from comb.hub.card.known import KNOWN, SHORT_NAMES
from comb.hub.card.parts import BEGIN, END, LICENCE, SETTLED, TAGS, Card, parse_card, with_own
from comb.hub.errors import HUB_ERRORS, reason

# a wheel carries the template inside the package (pyproject.toml), a source tree has it in model_cards/
_PLACES = (Path(__file__).parent / "template.md", Path(__file__).parents[3] / "model_cards" / "template.md")
TEMPLATE = next((path for path in _PLACES if path.is_file()), _PLACES[0])


def render(
    config: Any, folder: Path, repo: str, person: Card | None, weights: tuple[str | None, int | None], *,
    api: HfApi | None = None, pushing: bool = False,
) -> Card:  # fmt: skip
    """The card of an adapter, with what `comb train` and `comb eval` left beside it and what a person wrote.

    Args:
        person: the card as it was. weights: dtype of the adapter's weights, and so of its cache, and their number.
        api: asks the Hub for the backbone's licence; without it, only folders and the Hub's cache here are read.

    Raises:
        ValueError: if a record in `folder` is damaged.
    """
    try:
        training, evaluations = read_training(folder), read_evaluations(folder)
        backbone = config.backbone_name
        dtype, linked = str(weights[0]).removeprefix("torch."), is_hub_id(backbone)
        base = backbone if linked else SHORT_NAMES.get(backbone)
        results, title = eval_results(evaluations, config.method), repo.split("/")[-1]
        sets = [(name, id, KNOWN.get(id or name)) for name, id in (training["datasets"] if training else ())]
        datasets = dict.fromkeys(id for _, id, _ in sets if id is not None)
        licence, why, spoken = _licence(config, folder, person, api)
        languages = sorted({language for *_, known in sets if known for language in known.languages}) or spoken
        if person is not None and "language" in person.header:
            languages = person.header["language"]
        card: ModelCard = ModelCard.from_template(
            ModelCardData(
                library_name="comb", pipeline_tag="text-generation", tags=TAGS,
                # the Hub links an adapter to its backbone by this field, which must be a Hub id
                base_model=base, base_model_relation="adapter" if base else None, language=languages or None,
                datasets=list(datasets) or None, metrics=list(dict.fromkeys(r.metric_type for r in results)) or None,
                model_name=title if results else None, eval_results=results or None, **licence,
            ),
            template_str=TEMPLATE.read_text(encoding="utf-8"),
            begin=BEGIN, end=f"{END} -->", title=title, repo=repo, backbone=backbone, linked=linked,
            fingerprint=None if linked or backbone in backbones else fingerprint_name(config.backbone_fingerprint),
            base=base, spoken=spoken, sets=sets, pictures=[path.name for path in sorted(folder.glob("*.png"))],
            bundled=backbone in backbones, revision=config.backbone_revision, licence_why=why,
            model_type=config.get_text_config().model_type, method=config.method, config=config, dtype=dtype,
            parameters=weights[1], bytes_per_value={"float64": 8, "float32": 4}.get(dtype, 2),
            training=training, evaluations=evaluations,
            # whether this installation has `comb serve`
            serves=any(entry.name == "serving" for entry in metadata.entry_points(group="comb.commands")),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, UndefinedError) as error:
        records = [path.name for pattern in (TRAINING, RESULTS) for path in sorted(folder.glob(pattern))]
        if not records:
            raise
        what = f"{' or '.join(records)} is damaged, as comb doesn't write it"
        raise ValueError(f"{folder}: {what} ({type(error).__name__}: {error}): remove it, or make it again") from error
    return with_own(parse_card(card.content, str(TEMPLATE)), person, pushing=pushing)


def _licence(config: Any, folder: Path, person: Card | None, api: HfApi | None) -> tuple[dict[str, Any], str, Any]:
    """The header's values for it, and where they are from: the card's own if it was for this backbone, or that's.

    Behind them stand the languages of the backbone; None where they aren't known.
    """
    backbone, header = config.backbone_name, {} if person is None else person.header
    found, why = inherited_licence(config.backbone_name_or_path, config.backbone_revision, folder, api=api)
    base = SHORT_NAMES.get(backbone, backbone)
    known = KNOWN.get(base)
    languages = found.pop("language", None) or (list(known.languages) if known else None)
    if not found and known is not None:
        found, why = {"license": known.licence}, f"that of {base}"
    stated = {key: header[key] for key in LICENCE if key in header}
    if "license" in stated and stated != found and header.get("base_model", base) in (base, None):
        return stated, "as this card states", languages
    return found, why, languages


def inherited_licence(
    backbone: str, revision: str | None, folder: Path, *, api: HfApi | None = None
) -> tuple[dict[str, Any], str]:
    """What the card of `backbone` states, empty if that isn't known; and where it is from, or why it isn't known.

    With its languages, where that card has them.
    """
    name = public(backbone)
    try:
        if backbone in backbones and callable(backbones.get(backbone)):  # nothing is fetched for a card
            return {}, f"the card of {name} was not looked up"
        place = Path(resolve_name(backbone_beside(backbone, folder))) if backbone else Path("?")
        card = place / "README.md"
        if not place.is_dir():
            if not is_hub_id(backbone):
                return {}, f"there is no backbone {name!r} to read it from"
            card = Path(
                (api or HfApi()).hf_hub_download(backbone, card.name, revision=revision, local_files_only=not api)
            )
        header = parse_card(card.read_text(encoding="utf-8"), str(card)).header
    except HFValidationError:  # looks like an id, and is none: a folder that isn't there any more
        return {}, f"there is no backbone {name!r} to read it from"
    except HUB_ERRORS as error:
        return {}, f"the card of {name} {f'could not be read ({reason(error)})' if api else 'was not looked up'}"
    except ValueError:
        return {}, f"the card of {name} has a header that can't be read"
    found = {key: header[key] for key in SETTLED if isinstance(header.get(key), str | list)}
    return (found, f"from the card of {name}") if "license" in found else ({}, f"the card of {name} states none")
