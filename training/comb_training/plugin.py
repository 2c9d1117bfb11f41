"""What training adds to the library: dataset names, the nano backbone, and the commands train, answers, eval and demo.

Imported at the first look into a registry, so it must stay light: nothing here imports more than `comb` itself does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comb.backbones.loading import backbones
from comb.documents.datasets import datasets, hub_ids

if TYPE_CHECKING:
    import typer

READERS = {
    "2wikimultihopqa": "comb_training.data.readers.two_wiki:read_2wikimultihopqa",
    "babi": "comb_training.data.readers.babi:read_babi",
    "hotpotqa": "comb_training.data.readers.hotpotqa:read_hotpotqa",
    "jsonl": "comb_training.data.readers.jsonl:read_jsonl",
    "kv_retrieval": "comb_training.data.readers.kv_retrieval:read_kv_retrieval",
    "longbench": "comb_training.data.readers.longbench:read_longbench",
    "multi_news": "comb_training.data.readers.multi_news:read_multi_news",
    "musique": "comb_training.data.readers.musique:read_musique",
    "nano": "comb_training.data.readers.nano:read_nano",
    "natural_instructions": "comb_training.data.readers.natural_instructions:read_natural_instructions",
    "natural_instructions_v1": "comb_training.data.readers.natural_instructions:read_natural_instructions_v1",
    "nq_open": "comb_training.data.readers.nq_open:read_nq_open",
    "samsum": "comb_training.data.readers.samsum:read_samsum",
    "squad": "comb_training.data.readers.squad:read_squad",
    "wikihop": "comb_training.data.readers.wikihop:read_wikihop",
    "xsum": "comb_training.data.readers.xsum:read_xsum",
}

BACKBONES = {"nano": "comb_training.nano:CHECKPOINT", "nano-hybrid": "comb_training.nano:HYBRID_CHECKPOINT"}

# where the card of an adapter links to, per part of the path the data was read from
HUB_IDS = {
    "2wikimultihopqa": (("", "framolfese/2WikiMultihopQA"),),
    "babi": (("", "facebook/babi_qa"),),
    "hotpotqa": (("", "hotpotqa/hotpot_qa"),),
    "longbench": (("", "Xnhyacinth/LongBench"),),
    "multi_news": (("", "alexfabbri/multi_news"),),
    "natural_instructions": (("", "Muennighoff/natural-instructions"),),
    "nq_open": (("", "google-research-datasets/nq_open"),),
    "samsum": (("dialogsum", "knkarthick/dialogsum"), ("", "knkarthick/samsum")),
    "squad": (("v1", "rajpurkar/squad"), ("", "rajpurkar/squad_v2")),
    "xsum": (("", "EdinburghNLP/xsum"),),
}


def register() -> None:
    """Adds dataset readers and the nano backbones to their registries; calling it again changes nothing."""
    for name, target in READERS.items():
        if name not in datasets:
            datasets.register_lazy(name, target)
    hub_ids.update(HUB_IDS)
    for name, target in BACKBONES.items():
        if name not in backbones:
            backbones.register_lazy(name, target)


def add_commands(app: typer.Typer) -> None:
    """Adds the commands to the `comb` application."""
    from comb.bench.options import bench
    from comb_training.cli import commands

    app.command("train")(commands.train)
    app.command("answers")(commands.answers)
    app.command("eval")(commands.evaluate)
    app.command("demo")(commands.demo)
    if "train" not in {command.name for command in bench.registered_commands}:
        bench.command("train")(commands.bench_train)
