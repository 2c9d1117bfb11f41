"""Every block of the README and the docs runs as it is printed, or says above it why it doesn't.

Pages are tried in a folder as a reader has it: the checkout's configs, scripts and examples, rows of one's own, public
sets as scripts/fetch-data lays them out, and a cache with tiny models and sets under the names that the pages use. Two
things are changed: MODEL and the like are replaced (`NAMES`), and what would take minutes has less to do (`LESS`).
What wants vLLM runs in tests/serving/test_docs_served.py.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from comb_training.config import load_config
from tests.helpers import doc_blocks
from tests.helpers.doc_blocks import LANGUAGES, PAGES, ROOT, Block, Command, blocks
from tests.helpers.forks import Forks

TRAIN = ["train.max_seconds=null", "train.steps=2", "eval.limit=2"]
SHORT = ["--lengths", "128,256", "--segment-tokens", "64", "--repeats", "1"]
SMALL = ["--layers", "2", "--hidden", "64", "--heads", "4", "--kv-heads", "2"]
NAMES = {
    "MODEL": "nano",
    "ADAPTER": "out/nano",
    "FOLDER": "data",
    "CONFIG": "configs/nano.yaml",
    "ORG/NAME": "nano",
}
"""What a reader puts in the place of."""
LESS: dict[str, list[str]] = {
    "comb train": TRAIN,
    "comb train configs/nano.yaml": [*TRAIN, "data.limit=24"],
    "comb train CONFIG": [*TRAIN, "data.limit=24"],
    "comb train configs/linktokens-smollm2-135m.yaml": [*TRAIN, "data.epoch_examples=52"],
    "comb train configs/front.yaml --dry-run": [*TRAIN, "data.epoch_examples=52"],
    "comb answers": ["data.limit=4"],
    "comb eval": ["--limit", "2"],
    "comb push": ["--dry-run"],
    "comb bench methods": ["--questions", "1", "--kl-questions", "1", "--timing-questions", "0"],
    "comb bench context-length": [*SHORT, *SMALL],
    "comb bench context-length --model Qwen": SHORT,
    "comb bench drift": ["--limit", "1"],
    "comb bench mac": ["--limit", "2", "--questions", "1", "--max-new-tokens=8"],
    "comb bench paper": ["--questions", "1", "--only", "Table 4"],
    "comb bench paper epic": ["--questions", "1", "--only", "arXiv Fig. 6"],
}
"""What commands that begin so are given beside what is printed; the longest beginning counts."""
MADE = {
    "out/demo": "configs/nano.yaml",
    "out/nano": "configs/nano.yaml",
    "out/adapter": "configs/nano.yaml",
    "out/linktokens-smollm2-135m": "configs/linktokens-smollm2-135m.yaml",
    "training/adapters/linktokens-smollm2-135m": "configs/linktokens-smollm2-135m.yaml",
    "training/adapters/linktokens-qwen2.5-coder-0.5b": "configs/linktokens-smollm2-135m.yaml model=qwen2.5-coder-0.5b",
    "out/front": "configs/front.yaml model=nano",
}
"""Adapters that commands and programs name: how each is trained."""


@dataclass(frozen=True)
class Reader:
    """Who tries a page: where they are, and what they type into."""

    folder: Path
    forks: Forks

    def comb(self, what: str, words: list[str]) -> None:
        status, output = self.forks.comb(words)
        assert status == 0, f"{what}\n{' '.join(words)}\n{output[-3000:]}"

    def run(self, command: Command) -> None:
        """A command as it is printed."""
        words = command.words
        for name, value in NAMES.items():
            words = [re.sub(rf"(?<![\w/]){name}(?![\w/])", value, word) for word in words]
        for word in words:
            self.make(word)
        assert words[0] == "comb", f"how is this run? {command.text}"
        more = max((start for start in LESS if command.text.startswith(start)), key=len, default="")
        self.comb(command.text, [*words[1:], *LESS.get(more, [])])

    def make(self, text: str) -> None:
        """Trains the adapters that a text names, unless they are there."""
        for name, how in MADE.items():
            if re.search(rf"{name}(?![\w.-])", text) and not (self.folder / name / "config.json").exists():
                less = LESS.get(f"comb train {how.split()[0]}", TRAIN)
                self.comb(name, ["train", *how.split(), *less, f"train.output_dir={name}", "--no-eval"])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    home = tmp_path_factory.mktemp("reader")
    with doc_blocks.reader(home) as forks:
        yield Reader(home / "comb", forks)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def of(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def _is_tried(block: Block, language: str) -> bool:
    return block.language == language and not block.not_run and not block.served


def programs(page: Path) -> list[str]:
    """Those that don't say why they don't run here."""
    return [f"# {each.place}\n{each.text}" for each in blocks(page) if _is_tried(each, "python")]


@pytest.mark.parametrize("page", of("bash"), ids=named)
def test_commands(page: Path, reader: Reader) -> None:
    """One after the other, as a reader goes through the page."""
    failed = []
    for block in blocks(page):
        for command in block.commands() if block.language == "bash" else ():
            if not command.not_run and not command.served:
                try:
                    reader.run(command)
                except AssertionError as error:
                    failed.append(f"{block.place}: {error}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=named)
def test_programs(page: Path, reader: Reader) -> None:
    """A page's programs go on from each other."""
    text = "\n".join(programs(page))
    reader.make(text)
    status, output = reader.forks.python(text)
    assert status == 0, f"{text}\n{output[-3000:]}"


@pytest.mark.parametrize("page", [*of("yaml"), *of("json")], ids=named)
def test_files(page: Path, tmp_path: Path) -> None:
    """They are parsed; parts of a configuration are keys that it has."""
    for block in blocks(page):
        if _is_tried(block, "json"):
            assert json.loads(block.text)
        elif _is_tried(block, "yaml"):
            file = tmp_path / "config.yaml"
            file.write_text(block.text)
            assert load_config(file, [])


def test_every_block_is_in_a_language_that_is_tried() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{block.place}: a block in {block.language!r}: one of {LANGUAGES}"
            commands = block.commands() if block.language == "bash" else []
            for start in block.not_run:
                one = any(each.text.startswith(start) for each in commands)
                assert one or not start, f"{block.place}: no command begins with {start!r}"
        hidden = re.search(r"^    (comb|python|pip|scripts/|from|import) .*", _without_blocks(page), re.MULTILINE)
        assert hidden is None, f"{named(page)}: a block without a fence isn't tried: {hidden and hidden[0]}"


def _without_blocks(page: Path) -> str:
    return re.sub(r"^( *)```\w*\n.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_what_does_not_run_is_counted() -> None:
    """Printed with -rP."""
    everything = [block for page in PAGES for block in blocks(page)]
    reasons = [(f"{each.place} {start}", why) for each in everything for start, why in each.not_run.items()]
    run = [block for block in everything if "" not in block.not_run]
    commands = [(block, block.commands() if block.language == "bash" else []) for block in run]
    served = sum(block.served or any(c.served and not c.not_run for c in those) for block, those in commands)
    print(f"{len(everything)} blocks: {len(run)} run, {served} of them with vLLM")
    print("\n".join(map(": ".join, reasons)))
    written = [re.findall(r"^ *<!-- not run", page.read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES]
    assert sum(map(len, written)) == len(reasons)  # each is taken by a block


def test_what_is_changed_of_commands_is_printed() -> None:
    """Else a command is gone, and what it was given isn't needed."""
    texts = [
        each.text for page in PAGES for block in blocks(page) if block.language == "bash" for each in block.commands()
    ]
    for start in LESS:
        assert any(text.startswith(start) for text in texts), start
    everything = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in (*NAMES, *MADE):
        assert name in everything, name


def test_commands_in_the_text_are_ones_that_there_are() -> None:
    """By their options alone: ``comb bench methods --model YOURS``, say."""
    import typer

    from comb.cli import main

    main._add_commands()
    group = typer.main.get_command(main.app)
    wrong = []
    for page in PAGES:
        for text in re.findall(r"`(comb [a-z][^`]*)`", re.sub(r"\s*\n\s*", " ", _without_blocks(page))):
            words = shlex.split(text.replace("...", "").replace("|", " "))[1:]
            command = group
            while words and words[0] != "--help" and hasattr(command, "get_command"):
                there = command.list_commands(typer.Context(command))
                found = command.get_command(typer.Context(command), words[0]) if words[0] in there else None
                if found is None:
                    wrong.append(f"{named(page)}: `{text}`: there is no {words[0]!r}")
                    break
                command, words = found, words[1:]
            taken = (option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
            known = {"--help", *taken}
            loose = command.context_settings.get("ignore_unknown_options", False)
            wrong += [
                f"{named(page)}: `{text}`: there is no {word}"
                for word in words
                if word.startswith("--") and not loose and word.partition("=")[0] not in known
            ]
    assert not wrong, "\n".join(wrong)
