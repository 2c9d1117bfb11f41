"""The fenced blocks of the README and the docs, and a folder in which a reader would try them.

A block runs, or says why it doesn't in a comment directly above: ``<!-- not run: REASON -->``, or, of the lines of
a shell block that begin so, ``<!-- not run, COMMAND: REASON -->``.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers.forks import Forks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("bash", "python", "yaml", "json")

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)\s*$")
_NOT_RUN = re.compile(r"\s*<!-- not run(?:, (?P<command>[^:]+))?: (?P<reason>.+) -->\s*$")
_SERVED = re.compile(r"comb serve |curl |from comb_serving import ")


@dataclass(frozen=True)
class Command:
    """A line of a shell block, with those that go on with it.

    Args:
        not_run: why it doesn't run here; "" if it does.
    """

    text: str
    not_run: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def served(self) -> bool:
        """Whether it wants vLLM or a server."""
        return _SERVED.match(self.text) is not None


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        not_run: reasons by the beginnings of the commands that they are about; "" is all of them.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def served(self) -> bool:
        return self.language == "python" and _SERVED.search(self.text) is not None

    def commands(self) -> list[Command]:
        """Of a shell block."""
        found, text = [], ""
        for line in self.text.split("\n"):
            text += line
            if text.endswith("\\"):
                text = text[:-1]
                continue
            try:
                words = shlex.split(text, comments=True)
            except ValueError:  # a text in quotes that goes on
                text += "\n"
                continue
            if words:
                found.append(Command(text, self._reason(text)))
            text = ""
        assert not text, f"{self.place}: a command has no end: {text}"
        return found

    def _reason(self, text: str) -> str:
        return next((reason for start, reason in self.not_run.items() if text.startswith(start)), "")


def blocks(page: Path) -> Iterator[Block]:
    """Those of a page that are in a language; others show what is printed."""
    lines = page.read_text(encoding="utf-8").split("\n")
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
        above, not_run = number - 1, {}
        while above >= 0 and (said := _NOT_RUN.match(lines[above])):
            not_run[said["command"] or ""] = said["reason"]
            above -= 1
        if fence["language"]:
            text = "\n".join(line.removeprefix(fence["indent"]) for line in lines[number + 1 : end])
            yield Block(page, number + 1, fence["language"], text, not_run)
        number = end + 1


# --- what a reader has --------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
REVISION = "0" * 40
HUB = {
    "Qwen/Qwen3-0.6B": ("Qwen3Config", {"head_dim": 32}),
    "Qwen/Qwen3-8B": ("Qwen3Config", {"head_dim": 32}),
}
"""Models that pages name, by their class of configuration; tiny ones stand in the cache under these names."""


NAMES = ["Ada", "Bram", "Cato", "Dora", "Egon", "Fay", "Gil", "Hana", "Ivo", "Jette"]
TOWNS = ["Rome", "Oslo", "Bern", "Kiel", "Lund", "Metz", "Nice"]


def mine(count: int) -> list[dict[str, Any]]:
    """Rows of one's own: people, their work and their towns."""
    rows = []
    for number in range(count):
        who, other = f"{NAMES[number % 10]} Berg{number}", f"{NAMES[(number + 3) % 10]} Holm{number}"
        town, elsewhere = TOWNS[number % 7], TOWNS[(number + 2) % 7]
        documents = [f"{who} keeps bees and lives in {town}.", f"{other} repairs clocks in {elsewhere}."]
        rows.append({"documents": documents, "query": f"Where does {who} live?", "answer": town})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_tiny(folder: Path, config: str, **more: Any) -> None:
    """A model with random weights, the nano backbone's tokenizer and a chat template for every role."""
    import transformers as tf

    from comb_training.nano import CHECKPOINT

    tokenizer = tf.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = CHAT
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(getattr(tf, config)(**{**sizes, **more}))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def reader(home: Path) -> Iterator[Forks]:
    """A folder as a reader has it, and what they type into there."""
    folder = home / "comb"
    folder.mkdir()
    for name in ("configs", "examples", "scripts", "serving"):
        (folder / name).symlink_to(ROOT / name)
    write_rows(folder / "mine.jsonl", mine(200))
    write_rows(folder / "more.jsonl", mine(40))
    write_rows(folder / "other.jsonl", mine(12))
    write_rows(folder / "books.jsonl", [{"text": _paragraph(number, 12)} for number in range(40)])
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"Document {name} is short.\n")
    fill_cache(home / "hf")
    fill_sets(home / "hf")
    fill_data(folder / "data")
    with Forks(folder, environment(home)) as forks:
        yield forks


def environment(home: Path) -> dict[str, str]:
    """Of a process that finds the cache there, and this checkout."""
    return {
        "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }  # fmt: skip


def fill_cache(home: Path) -> None:
    """A Hugging Face cache (HF_HOME) as after downloads of the models that pages name."""
    from comb.backbones.gguf import MODELS

    for name, (config, more) in HUB.items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        save_tiny(folder / "snapshots" / REVISION, config, **more)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(REVISION)
    for model in MODELS:
        save_tiny(
            home / "comb" / "backbones" / f"{model.name}-{model.sha256[:12]}", "LlamaConfig", num_hidden_layers=30
        )


ROWS = 540
"""So many that the recipes' epochs are full."""
PARAGRAPH = "{who} keeps bees near {town}, and sells the honey on the market there every week of the year. "


def _paragraph(number: int, sentences: int = 2) -> str:
    return "".join(PARAGRAPH.format(who=f"Ada Berg{number}", town=TOWNS[number % 7]) for _ in range(sentences)).strip()


def _squad(number: int) -> dict[str, Any]:
    return {
        "id": f"q{number}", "title": f"t{number // 3}", "context": _paragraph(number),
        "question": f"Who keeps bees {number}?", "answers": {"text": [f"Ada Berg{number}"], "answer_start": [0]},
    }  # fmt: skip


def _hotpot(number: int) -> dict[str, Any]:
    context = {"title": ["Ada", "Honey"], "sentences": [[_paragraph(number)], ["Honey is sold weekly."]]}
    return {"id": f"h{number}", "question": f"What does Ada Berg{number} keep?", "answer": "bees", "context": context}


def _musique(number: int) -> dict[str, Any]:
    texts = {"Ada": _paragraph(number), "B": "Bees buzz."}
    paragraphs = [{"title": title, "paragraph_text": text} for title, text in texts.items()]
    return {**_hotpot(number), "paragraphs": paragraphs, "answer_aliases": [], "answerable": True}


def _article(number: int) -> dict[str, Any]:
    return {"id": f"x{number}", "document": _paragraph(number), "summary": f"Ada Berg{number} keeps bees."}


def fill_sets(home: Path) -> None:
    """The rest of that cache: sets that configurations name, a few made-up rows each in their own form."""
    sets = {
        ("rajpurkar/squad_v2", "squad_v2"): _squad, ("hotpotqa/hotpot_qa", "distractor"): _hotpot,
        ("dgslibisey/MuSiQue", "default"): _musique, ("framolfese/2WikiMultihopQA", "default"): _hotpot,
        ("knkarthick/samsum", "default"): lambda n: {
            "id": f"d{n}", "dialogue": f"Ada: Bees {n}?\nBo: Honey.", "summary": f"They speak of bees {n}.",
        },
        ("EdinburghNLP/xsum", "default"): _article, ("alexfabbri/multi_news", "default"): _article,
        ("Salesforce/wikitext", "wikitext-2-raw-v1"): lambda n: {"text": _paragraph(n, 12)},
    }  # fmt: skip
    for (name, config), row in sets.items():
        _cache_set(home, name, config, [row(number) for number in range(ROWS)])


def _cache_set(home: Path, name: str, config: str, rows: list[dict[str, Any]]) -> None:
    """What the package datasets keeps of a set that it has loaded."""
    from datasets import load_dataset
    from datasets.naming import camelcase_to_snakecase

    owner, _, own = name.partition("/")
    own = camelcase_to_snakecase(own)
    source, made = home / "sources" / own, home / "made"
    for split in ("train", "validation"):
        write_rows(source / f"{split}.jsonl", rows)
    load_dataset(str(source), cache_dir=str(made))
    (folder,) = (path.parent for path in made.glob(f"{own}/*/*/*/dataset_info.json"))
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps({**info, "config_name": config}))
    target = home / "datasets" / f"{owner}___{own}" / config / "0.0.0" / folder.name
    target.parent.mkdir(parents=True)
    folder.rename(target)


def fill_data(folder: Path) -> None:
    """Made-up files laid out as scripts/fetch-data lays them out."""
    gold = [
        {"question": f"who keeps bees {n}", "answers": [f"Ada Berg{n}"],
         "ctxs": [{"title": f"T{n}", "text": _paragraph(n), "isgold": True}]}
        for n in range(ROWS)
    ]  # fmt: skip
    (folder / "nq_open").mkdir(parents=True)
    with gzip.open(folder / "nq_open" / "nq-open-oracle.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in gold)
    squad = [
        {"title": f"t{n}", "paragraphs": [
            {"context": row["context"], "qas": [{
                "id": row["id"], "question": row["question"], "is_impossible": False,
                "answers": [{"text": row["answers"]["text"][0], "answer_start": 0}],
            }]}
            for row in map(_squad, range(3 * n, 3 * n + 3))
        ]}
        for n in range(20)
    ]  # fmt: skip
    (folder / "squad").mkdir()
    (folder / "squad" / "dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": squad}))
    hotpot = [_hotpot(n) | {"_id": f"h{n}", "context": [["Ada", [_paragraph(n)]], ["B", ["Bees."]]]} for n in range(40)]
    (folder / "hotpotqa").mkdir()
    (folder / "hotpotqa" / "hotpot_dev_fullwiki_v1.json").write_text(json.dumps(hotpot))
    story = "1 {0} moved to the hall.\n2 {1} went to the office.\n3 Where is {0}? \thall\t1\n"
    (folder / "babi" / "en-10k").mkdir(parents=True)
    for side in ("train", "test"):
        text = "".join(story.format(NAMES[n % 6], NAMES[(n + 1) % 6]) for n in range(60))
        (folder / "babi" / "en-10k" / f"qa1_single-supporting-fact_{side}.txt").write_text(text)
    tasks = folder / "natural_instructions_v2" / "tasks"
    tasks.mkdir(parents=True)
    for number in range(6):
        shown = [{"input": "two", "output": "2", "explanation": "a number"}]
        asked = [{"id": f"i{number}-{n}", "input": f"input {n}", "output": [str(n)]} for n in range(8)]
        task = {"Definition": [f"Write numbers, way {number}."], "Positive Examples": shown, "Instances": asked}
        (tasks / f"task00{number}_numbers.json").write_text(json.dumps(task))
