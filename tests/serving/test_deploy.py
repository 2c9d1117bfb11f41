"""The deployment files: they parse, name files and options that exist, and ask for series that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from comb_serving.config.serve_options import ServeOptions, parse_bytes
from comb_serving.launch.launcher import read_flags
from comb_serving.plugin import add_commands
from comb_serving.pool.capability import LinkReport
from tests.helpers.middleware_server import Server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "serving" / "deploy"
PANELS = json.loads((DEPLOY / "grafana" / "dashboards" / "comb.json").read_text())["panels"]
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: dict[str, Any] = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


async def test_the_dashboard_asks_for_our_series_as_they_are() -> None:
    pytest.importorskip("prometheus_client", reason="comes with vLLM")
    there = await shown_by(Server()) | await shown_by(Server(method="naive"))
    expressions = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
    asked = {name for text in expressions for name in re.findall(r"comb:[a-z_]+", text)}
    assert asked <= there
    # counters whose `_total` is forgotten are what this test is for
    assert "comb:evictions" not in there
    # whatever is counted is shown somewhere
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in there} == shown
    assert {"comb:method", "comb:tenant_blocks", "comb:audit_tokens_total"} <= there


async def shown_by(server: Server) -> set[str]:
    """The series of a server that has answered a tenant's request and audited one."""
    from prometheus_client import generate_latest

    assert (await server.chat("alice")).status == 200
    counters = server.manager.counters
    counters.count_audit("naive", 3, 4)
    counters.count_new(3)
    counters.count_prompt("naive", LinkReport(1, 2, 3))
    registry = server.registry(SimpleNamespace(waiting=0, restarts=0, kept_bytes={}))
    return set(re.findall(r"^(comb:[a-z_]+)", generate_latest(registry).decode(), re.M))


def test_compose_names_files_volumes_and_options_that_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = re.sub(r"^\$\{[^}]*\}", "${}", volume).split(":")[0]
            assert source == "${}" or source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume
    build = COMPOSE["services"]["comb"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    for kind in ("gpu", "cpu"):
        assert (ROOT / f"serving/deploy/Dockerfile.{kind}").exists()


class DeployedServer(NamedTuple):
    arguments: list[str]
    shared_memory: str
    grace_seconds: float
    port: int
    health: set[str]


def deployed(name: str) -> DeployedServer:
    """The server that a file starts."""
    if name == "kubernetes":
        pod = KUBERNETES["Deployment"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (shm,) = (volume for volume in pod["volumes"] if volume["name"] == mounts["/dev/shm"])
        assert shm["emptyDir"]["medium"] == "Memory"
        (port,) = container["ports"]
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
        assert {probe["port"] for probe in probes} == {port["name"]}
        paths, grace = {probe["path"] for probe in probes}, pod["terminationGracePeriodSeconds"]
        return DeployedServer(container["args"], shm["emptyDir"]["sizeLimit"], grace, port["containerPort"], paths)
    # what stands in the second one counts
    service = COMPOSE["services"]["comb"] | yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())["services"]["comb"]
    (port,) = service["ports"]
    outside, inside = port.split(":")
    (url,) = re.findall(r"http://localhost:([0-9]+)(/[a-z]+)", service["healthcheck"]["test"][-1])
    assert outside == inside == url[0]
    grace = float(service["stop_grace_period"].removesuffix("s"))
    return DeployedServer(service["command"], service["shm_size"], grace, int(inside), {url[1]})


@pytest.mark.parametrize("name", ["compose", "compose.gpu", "kubernetes"])
def test_servers_are_started_with_options_that_exist_and_have_room_and_time(name: str) -> None:
    server = deployed(name)
    app = typer.Typer()
    add_commands(app)
    context = typer.main.get_command(app).make_context("serve", list(server.arguments))
    options, others = ServeOptions.read(context.params), context.args
    assert options.checkpoint == "/adapter"
    assert options.disk_path is not None
    assert parse_bytes(server.shared_memory) > options.pool_bytes
    assert server.grace_seconds >= options.drain_seconds + 5
    assert server.health == {"/health"}
    flags = read_flags(others, {})
    assert (flags.host, flags.port) == ("0.0.0.0", server.port)
    parsing = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsing.make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(others)


def test_kubernetes_names_what_is_there() -> None:
    pod = KUBERNETES["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    claim = KUBERNETES["PersistentVolumeClaim"]
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (size,) = (item.split("=")[1] for item in container["args"] if item.startswith("--comb-disk-bytes="))
    assert parse_bytes(claim["spec"]["resources"]["requests"]["storage"]) > parse_bytes(size)
    paths = [*(item.partition("=")[2] for item in container["args"]), *(item["value"] for item in container["env"])]
    mounted = tuple(mount["mountPath"] for mount in container["volumeMounts"])
    assert all(path.startswith(mounted) for path in paths if path.startswith("/"))
    # what others must not read is no argument, which everybody on the machine can
    assert container["envFrom"] == [{"secretRef": {"name": "comb"}}]
    service = KUBERNETES["Service"]["spec"]
    for selector in (service["selector"], KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"]):
        assert selector == pod["metadata"]["labels"]
    (port,) = service["ports"]
    assert port["targetPort"] == container["ports"][0]["name"]


def test_prometheus_and_grafana_find_each_other() -> None:
    compose = COMPOSE["services"]
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert host in compose
    assert int(port) == deployed("compose").port
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"].removeprefix("http://").split(":")[0] in compose
    assert {panel["datasource"]["uid"] for panel in PANELS if "datasource" in panel} == {source["uid"]}
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
