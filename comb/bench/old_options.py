"""Options that the commands below `comb bench` share, and the group they stand in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="adapter folder, backbone folder, Hub id, or nano")]
Methods = Annotated[str, typer.Option(help="separated by commas, parameters and all: full,legolink:16,comb")]
Backbone = Annotated[str | None, typer.Option(help="load the adapter's backbone from here instead")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
Out = Annotated[Path | None, typer.Option(help="JSON for the results; a .md table and a .png plot go beside it")]
Seed = Annotated[int, typer.Option(help="of everything drawn at random")]
DatasetName = Annotated[str, typer.Option("--dataset", help="a dataset's name, or a .jsonl file")]
DataPath = Annotated[str | None, typer.Option("--path", help="the dataset's file or folder")]
Split = Annotated[str, typer.Option(help="heldout, train or all")]
NumDocuments = Annotated[int | None, typer.Option(help="documents per question, for datasets that choose them")]
Limit = Annotated[int, typer.Option(min=1, help="questions at most")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="longest answer, in tokens")]
QueryTemplate = Annotated[str | None, typer.Option(help="how a question is written; {query} is replaced")]
DocumentTemplate = Annotated[str | None, typer.Option(help="how a document is written, with {text} and {title}")]
Splitter = Annotated[str | None, typer.Option(help="how long documents are split (KVSplit), for example fixed:512")]
Memory = Annotated[bool, typer.Option("--memory/--no-memory", help="measure peak memory")]
QueryTokens = Annotated[int, typer.Option(min=1, help="tokens behind the segments")]
OfRandomModel = Annotated[int, typer.Option(help="of the random model")]
