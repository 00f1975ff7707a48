"""What deploys the server holds together: images, compose files, Prometheus, the dashboard, CI. Nothing here needs a
container runtime: the files are read, and each rule for images finds what is planted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgl.runtime import metrics
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.metrics import Scrape, ServerMetrics
from tests.test_server_process import parsed

REPOSITORY = Path(__file__).resolve().parent.parent
DOCKER = REPOSITORY / "docker"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DASHBOARDS = ("sgl.json", "cluster.json")
COMPOSE_FILES = ("compose.yaml", "compose.cuda.yaml")
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")

Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """Each instruction of a Dockerfile and its arguments, without comments, continued lines in one."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def breaches(text: str) -> list[str]:
    """What a linter of Dockerfiles would say: images without a release, waste in layers, a process of root's."""
    found, stages = [], set()
    steps = instructions(text)
    last = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    for name, rest in steps:
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            if image not in stages and (":" not in image or image.endswith(":latest")):
                found.append(f"{image} names no release")
            stages.add(stage)
        if "apt-get install" in rest:
            if "--no-install-recommends" not in rest or " -y " not in rest:
                found.append("apt-get installs what is only recommended, or asks")
            if "rm -rf /var/lib/apt/lists/*" not in rest or "apt-get update" not in rest:
                found.append("the layer keeps apt's lists")
        if re.search(r"\bpip (install|wheel)\b", rest) and "--no-cache-dir" not in rest:
            found.append("the layer keeps pip's cache")
        if name == "ADD":
            found.append("ADD does more than COPY")
        if name in ("ENTRYPOINT", "CMD") and not rest.startswith("["):
            found.append(f"{name} runs a shell, which signals do not pass")
    users = [rest for name, rest in steps[last:] if name == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("the process is root's")
    return found


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_keeps_the_rules(name: str) -> None:
    assert breaches((DOCKER / name).read_text()) == []


GOOD = "FROM python:3.12\nUSER me\n"


@pytest.mark.parametrize(
    "text",
    [
        "FROM python\nUSER me",
        "FROM python:latest\nUSER me",
        "FROM python:3.12",
        f"{GOOD}FROM python:3.13",
        f"{GOOD}RUN pip install sgl",
        f"{GOOD}ADD . .",
        f"{GOOD}CMD sgl serve",
        f"{GOOD}RUN apt-get update && apt-get install -y gcc && rm -rf /var/lib/apt/lists/*",
        f"{GOOD}RUN apt-get update \\\n  && apt-get install --no-install-recommends -y gcc",
    ],
)
def test_a_planted_breach_is_found(text: str) -> None:
    assert breaches(GOOD) == []
    assert len(breaches(text)) == 1


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_installs_and_starts_what_there_is(name: str) -> None:
    steps = instructions((DOCKER / name).read_text())
    text = "\n".join(rest for _, rest in steps)
    [extras] = re.findall(r"sgl-\*\.whl\)\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert set(re.findall(r"torch==[\d.]+", text)) == set(
        re.findall(r"torch==[\d.]+", (REPOSITORY / "Makefile").read_text())
    )
    command = json.loads(dict(steps)["ENTRYPOINT"])
    assert command[0] in PROJECT["scripts"]
    _, server = parsed([*command[1:], "model"])
    assert server.host == "0.0.0.0"
    assert str(server.port) == dict(steps)["EXPOSE"]
    assert f"127.0.0.1:{server.port}/health" in dict(steps)["HEALTHCHECK"]


def test_the_context_of_a_build_holds_what_the_wheel_is_made_of() -> None:
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == {"sgl", "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_a_compose_file_names_what_there_is(name: str) -> None:
    compose = yaml.safe_load((DOCKER / name).read_text())
    base = yaml.safe_load((DOCKER / COMPOSE_FILES[0]).read_text())
    assert set(compose["services"]) <= set(base["services"])
    for service in compose["services"].values():
        if "build" in service:
            context = (DOCKER / service["build"].get("context", "..")).resolve()
            assert (context / service["build"]["dockerfile"]).is_file()
        elif "image" in service:
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service.get("volumes", ()):
            source, target, *mode = volume.split(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (DOCKER / source).is_file()
                assert mode == ["ro"]
            else:
                assert source in compose["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert set(service.get("depends_on", ())) <= set(base["services"])
        assert set(service.get("secrets", ())) <= set(compose.get("secrets", ()))


def test_the_composed_server_has_a_key_and_time_to_end() -> None:
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["sgl"]
    options = {
        f"SGL_{field.name.upper()}" for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)
    }
    assert set(service["environment"]) <= options
    assert service["environment"]["SGL_API_KEY"].startswith("${SGL_API_KEY:?")
    engine, server = parsed(["serve", *(re.sub(r"\$\{\w+:-(\w*)\}", r"\1", part) for part in service["command"])])
    assert engine.model_name == "embedded"
    assert int(service["stop_grace_period"].removesuffix("s")) > server.drain_timeout


def test_prometheus_asks_the_server_with_its_key() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    [job] = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert any(published.endswith(f":{port}") for published in compose["services"][host]["ports"])
    [secret] = compose["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose["secrets"][secret]["environment"] in compose["services"]["sgl"]["environment"]


def test_grafana_is_given_a_source_and_the_dashboard() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    mounted = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    [source] = yaml.safe_load((DOCKER / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in compose["services"]
    for name in DASHBOARDS:
        assert {item["uid"] for item in every(dashboard(name), "datasource")} == {source["uid"]}
        assert f"./grafana/{name}" in mounted
    [provider] = yaml.safe_load((DOCKER / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert str(Path(mounted["./grafana/sgl.json"]).parent) == provider["options"]["path"]


def dashboard(name: str = "sgl.json") -> dict[str, Any]:
    """Grafana's."""
    loaded: dict[str, Any] = json.loads((DOCKER / "grafana" / name).read_text())
    return loaded


def every(value: Any, key: str) -> list[Any]:
    """What `key` holds, at any depth."""
    if isinstance(value, list):
        return [found for item in value for found in every(item, key)]
    if not isinstance(value, dict):
        return []
    return ([value[key]] if key in value else []) + [found for item in value.values() for found in every(item, key)]


def samples() -> dict[str, set[str]]:
    """Each name that /metrics may have, and its labels."""
    server = ServerMetrics(responses={("/generate", 200): 1})
    tiers = [
        *(f"host_{name}" for name in ("total_tokens", "used_tokens", "total_states", "used_states")),
        "file_used_bytes",
    ]
    engine = dict.fromkeys([*metrics._GAUGES, *(source for source, _ in metrics._COUNTERS.values()), *tiers], 0)
    rank = dict.fromkeys(["engine", "rank", *(source for _, source, _ in metrics._RANKS.values())], 0)
    engine |= {"ranks": [rank]}  # type: ignore[dict-item]
    found: dict[str, set[str]] = defaultdict(set)
    for family in Scrape(server, "model", 1, engine).collect():
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def test_the_dashboard_shows_metrics_that_exist() -> None:
    known = samples()
    queries = every(dashboard(), "expr")
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"\bsgl:\w+", query)
        assert names
        assert set(names) <= set(known), query
        by = {label for labels in re.findall(r"by \(([\w, ]+)\)", query) for label in labels.split(", ")}
        assert by <= set.intersection(*(known[name] for name in names)), query
        matched = set(re.findall(r"[{,](\w+)=", query))
        assert matched == {"model_name"}, query
    [variable] = dashboard()["templating"]["list"]
    name, label = re.findall(r"[\w:]+", variable["query"]["query"])[1:]
    assert label in known[name]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_panels_fill_their_grid_without_overlap(name: str) -> None:
    panels = dashboard(name)["panels"]
    assert max(Counter(panel["id"] for panel in panels).values()) == 1
    cells = Counter(
        cell
        for place in (panel["gridPos"] for panel in panels)
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    )
    assert max(cells.values()) == 1
    assert {x for x, _ in cells} == set(range(24))
    rows = 1 + max(y for _, y in cells)
    assert len(cells) == 24 * rows, "no holes"


def test_ci_runs_the_script_on_each_python_that_the_package_is_for() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    [job] = workflow["jobs"].values()
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    assert commands == [[".ci/run"]]
    assert all(re.fullmatch(r"[\w/-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
