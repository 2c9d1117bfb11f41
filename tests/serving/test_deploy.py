"""The deployment files: they parse, name files and options that exist, and ask for series that are there."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from comb_serving.api.routes import CHAT
from comb_serving.config.serve_options import ServeOptions, flag_of
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.reports import LinkReport
from tests.helpers.middleware_server import Server, chat

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "serving" / "deploy"
LAYOUT = LinkingLayout(8, 16, 24, "model", "float32", 64, 4096)
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "comb.json"


def series(prefix: str) -> set[str]:
    """The series of the dashboard that begin with `prefix`."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return {name for text in expressions for name in re.findall(rf"{prefix}:[a-z_]+", text)}


async def test_the_dashboard_asks_for_our_series_as_they_are() -> None:
    pytest.importorskip("prometheus_client", reason="comes with vLLM")
    there = await shown_by(Server()) | await shown_by(Server(method="naive", layout=LAYOUT))
    assert series("comb") <= there
    # counters whose `_total` is forgotten are what this test is for
    assert "comb:evictions" not in there
    # whatever is counted is shown somewhere
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series("comb")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in there} == shown
    assert {"comb:method", "comb:tenant_blocks", "comb:audit_tokens_total"} <= there


async def shown_by(server: Server) -> set[str]:
    """The series of a server that has answered a tenant's request and audited one."""
    from prometheus_client import CollectorRegistry, generate_latest

    from comb_serving.api.metrics import CombCollector

    preprocessor = server.app.front().preprocessor
    assert (await server.client("alice").post(CHAT, chat())).status == 200
    preprocessor.counters.count_audit("naive", 3, 4)
    preprocessor.counters.count_prompt("naive", LinkReport(1, 2, 3))
    registry = CollectorRegistry()
    encoders: Any = SimpleNamespace(waiting=0, restarts=0, kept_bytes={})
    registry.register(CombCollector(preprocessor, encoders, server.app.options))
    return set(re.findall(r"^(comb:[a-z_]+)", generate_latest(registry).decode(), re.M))


def test_panels_do_not_overlap_and_have_one_id_each() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_compose_names_files_volumes_and_options_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = re.sub(r"^\$\{[^}]*\}", "${}", volume).split(":")[0]
            assert source == "${}" or source in compose["volumes"] or (DEPLOY / source).exists(), volume
    build = compose["services"]["comb"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    for kind in ("gpu", "cpu"):
        assert (ROOT / f"serving/deploy/Dockerfile.{kind}").exists()
    options = {flag_of(each) for each in fields(ServeOptions) if "default" in each.metadata}
    for one in (compose, gpu):
        given = [item.split("=")[0] for item in one["services"]["comb"]["command"] if item.startswith("--comb")]
        assert given
        assert set(given) <= options


def test_prometheus_and_grafana_find_each_other() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"][0].split(":")[0] in compose
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"].removeprefix("http://").split(":")[0] in compose
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {source["uid"]}
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/comb.yaml").read_text())["providers"][0]
    mounted = [volume.split(":")[1] for volume in compose["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_dockerfiles_copy_what_is_there_and_what_the_wheel_needs(kind: str) -> None:
    text = (DEPLOY / f"Dockerfile.{kind}").read_text()
    copied = [word for line in text.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]]
    ignored = (DEPLOY / f"Dockerfile.{kind}.dockerignore").read_text().splitlines()
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    project = (ROOT / "pyproject.toml").read_text()
    packages = re.search(r'^packages = (\["comb".*\])', project, re.M)
    assert packages is not None
    assert set(json.loads(packages[1])) <= set(copied)
    assert "0.32.0" in text
