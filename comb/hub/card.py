"""An adapter's card: what comb knows of it, rendered from one template, and what a person wrote around that.

The generated text stands between two markers, and is rewritten on every save; so are the header's values that comb
knows. All else is a person's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import CardData, HfApi, ModelCard, ModelCardData, RepoCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from jinja2 import UndefinedError

from comb.backbones import backbones
from comb.backbones.adapter import fingerprint_name
from comb.backbones.gguf import MODELS
from comb.backbones.loading import backbone_beside, is_hub_id, resolve_name
from comb.backbones.unpublished import public
from comb.files import read_text
from comb.hub.facts import RESULTS, TRAINING, eval_results, read_evaluations, read_training

# a wheel carries the template inside the package (pyproject.toml), a source tree has it in model_cards/
_PLACES = (Path(__file__).parent / "template.md", Path(__file__).parents[2] / "model_cards" / "template.md")
TEMPLATE = next((path for path in _PLACES if path.is_file()), _PLACES[0])

BEGIN, END = "<!-- comb: generated, rewritten on every save -->", "<!-- comb: end of the generated part"
GENERATED = ("library_name", "pipeline_tag", "base_model", "base_model_relation", "datasets", "metrics", "model-index")
"""Values of the header that comb writes. `TAGS` are joined with a person's, and of `SETTLED` a person's stay."""
TAGS = ["comb", "position-independent-caching", "kv-cache", "rag"]
LICENCE = ("license", "license_name", "license_link")
SETTLED = (*LICENCE, "language")


class Rights(NamedTuple):
    """Licence (as the Hub writes it) and languages of what is on the Hub, as cards are mostly written offline."""

    licence: str
    languages: tuple[str, ...] = ()


SHORT_NAMES = {model.name: model.hub for model in MODELS}
"""Ids of backbones with a name of comb's."""
KNOWN = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Rights("apache-2.0", ("en",)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": Rights("apache-2.0", ("en",)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Rights("apache-2.0", ("en",)),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": Rights("apache-2.0", ("en",)),
    "Qwen/Qwen3-0.6B": Rights("apache-2.0"),
    "Qwen/Qwen3-4B": Rights("apache-2.0"),
    "Qwen/Qwen3-8B": Rights("apache-2.0"),
    "meta-llama/Llama-3.1-8B-Instruct": Rights("llama3.1", ("en", "de", "fr", "it", "pt", "hi", "es", "th")),
    **dict.fromkeys(("nano", "nano-hybrid", "nano-ledger", "ledger"), Rights("apache-2.0", ("en",))),
    "facebook/babi_qa": Rights("cc-by-3.0", ("en",)),
    "google-research-datasets/nq_open": Rights("cc-by-sa-3.0", ("en",)),
    "hotpotqa/hotpot_qa": Rights("cc-by-sa-4.0", ("en",)),
    "knkarthick/dialogsum": Rights("cc-by-nc-sa-4.0", ("en",)),
    "knkarthick/samsum": Rights("cc-by-nc-nd-4.0", ("en",)),
    "rajpurkar/squad": Rights("cc-by-sa-4.0", ("en",)),
    "rajpurkar/squad_v2": Rights("cc-by-sa-4.0", ("en",)),
}


@dataclass(frozen=True)
class Card:
    """A card in parts: the YAML header's values, and the generated `body` with the text around it.

    Without a generated part (None) all text is in `before`.
    """

    header: dict[str, Any] = field(default_factory=dict)
    before: str = "\n"
    body: str | None = None
    after: str = "\n"

    @property
    def is_own(self) -> bool:
        """Whether all of the text is a person's: there is some, and no generated part."""
        return self.body is None and bool(self.before.strip())

    def own(self, looked_up: dict[str, Any]) -> dict[str, Any]:
        """What a person wrote: header values other than comb's and those that were looked up, and the text around."""
        found = {name: value for name, value in self.header.items() if name not in (*GENERATED, "tags")}
        found = {name: value for name, value in found.items() if looked_up.get(name) != value}
        tags = [tag for tag in self.header.get("tags") or () if tag not in TAGS]
        texts = {"before": self.before.strip(), "after": self.after.strip()}
        return {name: value for name, value in {"header": found, "tags": tags, **texts}.items() if value}

    def __str__(self) -> str:
        text = self.before if self.body is None else f"{self.before}{BEGIN}{self.body}{END} -->{self.after}"
        return f"---\n{CardData(**self.header).to_yaml()}\n---\n{text}" if self.header else text

    @classmethod
    def parse(cls, text: str, where: str) -> Card:
        """Takes a card apart. Raises ValueError, naming `where`, for a header that is no YAML mapping."""
        text = text.replace("\r\n", "\n")
        try:
            card = RepoCard(text) if text.startswith("---") else None
        except (yaml.YAMLError, ValueError) as error:
            told = " ".join(str(error).split())
            raise ValueError(f"{where}: the header between the --- lines is not valid YAML: {told}") from error
        header, rest = ({}, text) if card is None else (card.data.to_dict(), card.text)  # type: ignore[no-untyped-call]
        before, begin, generated = rest.partition(BEGIN)
        body, end, after = generated.partition(END)
        if not begin or not end:
            return cls(header, before=rest, after="")
        return cls(header, before, body, after.partition("-->")[2])  # earlier versions wrote something between

    def with_own(self, person: Card) -> Card:
        """This generated card with what a person wrote in an earlier one, its header in that one's order."""
        if person.is_own:
            return person
        own = person.own({name: person.header.get(name) for name in SETTLED})
        header = {**own.get("header", {}), **self.header}
        if tags := [*self.header.get("tags", ()), *own.get("tags", ())]:
            header["tags"] = tags
        header = {name: header[name] for name in dict.fromkeys([*person.header, *header]) if name in header}
        before, after = (text if text.strip() else "\n" for text in (person.before, person.after))
        return Card(header, before, self.body, after)


def render(
    config: Any, folder: Path, repo: str, weights: tuple[str | None, int | None], *, here: Card | None = None,
    there: Card | None = None, api: HfApi | None = None,
) -> tuple[Card, bool]:  # fmt: skip
    """The card of an adapter, with what `comb train` and `comb eval` left beside it and what a person wrote.

    And whether it replaces something that a person wrote in the one on the Hub.

    Args:
        weights: dtype of the adapter's weights, and so of its cache, and their number.
        here, there: the card as it is in the folder, and on the Hub. A person's words are those in the folder, or where
            there are none, those on the Hub.
        api: asks the Hub for the backbone's licence; without it, only folders and the Hub's cache here are read.

    Raises:
        ValueError: if a record in `folder` is damaged.
    """
    try:
        training, evaluations = read_training(folder), read_evaluations(folder)
        sets = [(name, id, KNOWN.get(id or name)) for name, id in (training["datasets"] if training else ())]
        looked_up, why = _looked_up(config, folder, api)
        spoken, of_sets = looked_up.get("language"), sorted({one for *_, known in sets if known for one in known[1]})
        looked_up |= {"language": of_sets} if of_sets else {}
        written = here is not None and (here.is_own or here.own(looked_up))
        person = (here if written else there or here) or Card()
        settled, why = _settled(person, looked_up, why, config)
        results, title = eval_results(evaluations, config.method), repo.split("/")[-1]
        backbone = config.backbone_name
        dtype, linked, bundled = str(weights[0]).removeprefix("torch."), is_hub_id(backbone), backbone in backbones
        base = backbone if linked else SHORT_NAMES.get(backbone)
        made: ModelCard = ModelCard.from_template(
            ModelCardData(
                library_name="comb", pipeline_tag="text-generation", tags=TAGS,
                # the Hub links an adapter to its backbone by this field, which must be a Hub id
                base_model=base, base_model_relation="adapter" if base else None,
                datasets=list(dict.fromkeys(id for _, id, _ in sets if id is not None)) or None,
                metrics=list(dict.fromkeys(r.metric_type for r in results)) or None,
                model_name=title if results else None, eval_results=results or None, **settled,
            ),
            template_str=TEMPLATE.read_text(encoding="utf-8"),
            begin=BEGIN, end=f"{END} -->", title=title, repo=repo, backbone=backbone, linked=linked,
            fingerprint=None if linked or bundled else fingerprint_name(config.backbone_fingerprint),
            base=base, spoken=spoken, sets=sets, pictures=[path.name for path in sorted(folder.glob("*.png"))],
            bundled=bundled, revision=config.backbone_revision, licence_why=why,
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
    card = Card.parse(made.content, str(TEMPLATE)).with_own(person)
    return card, there is not None and there.own(looked_up) not in ({}, card.own(looked_up))


def _settled(person: Card, looked_up: dict[str, Any], why: str, config: Any) -> tuple[dict[str, Any], str]:
    """Licence and languages as a person states them, else as they were looked up; and where the licence is from."""
    stated = {key: person.header[key] for key in SETTLED if key in person.header}
    backbone = SHORT_NAMES.get(config.backbone_name, config.backbone_name)
    if "license" not in stated or person.header.get("base_model", backbone) not in (backbone, None):
        # another backbone, another licence
        stated = {key: value for key, value in stated.items() if key not in LICENCE}
    elif any(looked_up.get(key) != stated[key] for key in LICENCE if key in stated):
        why = "as this card states"
        looked_up = {key: value for key, value in looked_up.items() if key not in LICENCE}
    return looked_up | stated, why


def _looked_up(config: Any, folder: Path, api: HfApi | None) -> tuple[dict[str, Any], str]:
    """The header's values for licence and languages of the backbone, empty where unknown, and where they are from."""
    found, why = inherited_licence(config.backbone_name_or_path, config.backbone_revision, folder, api=api)
    base = SHORT_NAMES.get(config.backbone_name, config.backbone_name)
    if (known := KNOWN.get(base)) is not None:
        if "license" not in found:
            found, why = {**found, "license": known.licence}, f"that of {base}"
        if "language" not in found and known.languages:
            found["language"] = list(known.languages)
    return found, why


def inherited_licence(
    backbone: str, revision: str | None, folder: Path, *, api: HfApi | None = None
) -> tuple[dict[str, Any], str]:
    """What the card of `backbone` states, its languages too, empty if that isn't known; and where from, or why not."""
    name = public(backbone)
    try:
        if backbone in backbones and callable(backbones.get(backbone)):  # nothing is fetched for a card
            return {}, f"the card of {name} was not looked up"
        place = Path(resolve_name(backbone_beside(backbone, folder))) if backbone else Path("?")
        card = place / "README.md"
        if not place.is_dir():
            if not is_hub_id(backbone):
                return {}, f"there is no backbone {name!r} to read it from"
            hub = api or HfApi()
            card = Path(hub.hf_hub_download(backbone, card.name, revision=revision, local_files_only=not api))
        header = Card.parse(read_text(card), str(card)).header
    except HFValidationError:  # looks like an id, and is none: a folder that isn't there any more
        return {}, f"there is no backbone {name!r} to read it from"
    except HUB_ERRORS as error:
        return {}, f"the card of {name} {f'could not be read ({reason(error)})' if api else 'was not looked up'}"
    except ValueError:
        return {}, f"the card of {name} has a header that can't be read"
    found = {key: header[key] for key in SETTLED if isinstance(header.get(key), str | list)}
    link = found.get("license_link")
    if isinstance(link, str) and "://" not in link:  # a file beside that card, which an adapter hasn't
        del found["license_link"]
        if is_hub_id(backbone):
            there = f"https://huggingface.co/{backbone}/blob/{revision or 'main'}"
            found["license_link"] = f"{there}/{link.removeprefix('./')}"
    return (found, f"from the card of {name}") if "license" in found else ({}, f"the card of {name} states none")


# what the Hub's client raises: its HTTP library's own errors (httpx or httpx2, by the client's version), and those that
# wrap what went wrong
HUB_ERRORS: tuple[Any, ...] = (HfHubHTTPError.__bases__[0], OSError, RuntimeError)
_MEANING = {
    401: "no valid token (401): set HF_TOKEN or run `hf auth login`, with a token that may write",
    403: "the token may not write there (403): take one with write access to this owner's repositories",
    412: "somebody else has pushed to it in the meantime (412): run the same command again, from what is there now",
}


def reason(error: BaseException) -> str:
    """An error of the Hub's client in a few words, with what to do where that is known."""
    while isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the Hub is not asked: unset it"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _MEANING:
        return _MEANING[status]
    if status is not None:
        server = str(getattr(error, "server_message", None) or "").strip()
        return f"the Hub answered {status}{f' ({server})' if server else ''}"
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}{f' ({said[0]})' if said else ''}"
