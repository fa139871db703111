"""deploy/: the files agree with the code and with a real scrape; the OpenAPI document is valid.

No container is built and no service is started here.
"""

import ast
import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from minillm.cli.app import build_parser
from minillm.serving import openapi
from minillm.serving.app import build_app
from minillm.serving.guard import OPEN_PATHS
from minillm.serving.settings import Settings
from tests.engine.small import write_model
from tests.serving.asgi_calls import call
from tests.serving.async_small import make_async, run

DEPLOY = Path(__file__).parents[2] / "deploy"
FUNCTIONS = {"sum", "max", "by", "rate", "increase", "histogram_quantile"}
HTTP_METHODS = {"get", "post"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    folder = write_model(tmp_path_factory.mktemp("byte-model"))
    engine = make_async(folder, speculative_config=speculation)
    yield build_app(engine, Settings(("m",)))
    engine.shutdown()


@pytest.fixture(scope="module")
def series(app: Any) -> dict[str, set[str]]:
    """Every sample of a scrape, with its labels."""

    async def scrape() -> str:
        body = {"prompt": "a", "max_tokens": 3}
        assert (await call(app, "/v1/completions", body)).status == 200
        return (await call(app, "/metrics")).text

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(run(scrape())):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana/dashboards/minillm.json").read_text())


def queries() -> list[tuple[str, str]]:
    """Every query of the dashboard, and its legend."""
    return [(one["expr"], one["legendFormat"]) for panel in dashboard()["panels"]
            for one in panel["targets"]]  # fmt: skip


# ---- Grafana and Prometheus --------------------------------------------------------------------


@pytest.mark.parametrize(("query", "legend"), queries())
def test_queries_name_metrics_and_labels_that_exist(query, legend, series):
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")
    labels = set(re.findall(r"(\w+)\s*=~?", " ".join(re.findall(r"{(.*?)}", query))))
    for group in re.findall(r"by \((.*?)\)", query):
        labels |= {each.strip() for each in group.split(",")}
    bare = re.sub(r"\{.*?\}|\[.*?\]|by \(.*?\)", " ", query)
    names = set(re.findall(r"[a-zA-Z_][\w:]*", bare)) - FUNCTIONS
    assert names
    for name in names:
        assert name in series, name
        assert labels <= series[name], (name, labels)
    shown = set(re.findall(r"{{(\w+)}}", legend))
    assert shown <= labels | {"instance"}  # which Prometheus adds


def test_compose_starts_what_prometheus_and_grafana_address():
    compose, scrape = read_yaml("compose.yaml"), read_yaml("prometheus.yml")["scrape_configs"][0]
    services = compose["services"]
    for name, service in services.items():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), name
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            exists = (
                (DEPLOY / source).exists() if source[0] == "." else source in compose["volumes"]
            )
            assert exists, mount
        image = service["image"]
        assert image == "minillm" or re.search(r":v?\d+\.\d+\.\d+$", image), image
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert host in services
    assert services[host]["ports"][0].endswith(f":{port}")
    secret = scrape["authorization"]["credentials_file"].rpartition("/")[2]
    assert secret in services["prometheus"]["secrets"]
    assert compose["secrets"][secret]["environment"] in services["server"]["environment"]
    assert (DEPLOY / services["server"]["build"]["context"] / "deploy/Dockerfile").is_file()
    grafana = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert grafana["url"].removeprefix("http://").split(":")[0] in services


# ---- the image and the unit --------------------------------------------------------------------


def test_the_image_runs_the_server_as_a_user_with_a_health_check():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and line[0] not in "# "]
    final = steps[max(i for i, step in enumerate(steps) if step[0] == "FROM") :]
    users = [rest for kind, rest in final if kind == "USER"]
    assert users == ["minillm"]
    root = DEPLOY.parent
    for kind, rest in steps:
        if kind == "COPY" and not rest.startswith("--from"):
            assert all((root / each).exists() for each in rest.split()[:-1]), rest
    entry = json.loads(dict(final)["ENTRYPOINT"]) + json.loads(dict(final)["CMD"])
    args = build_parser().parse_args(entry[1:])
    assert (args.command, args.host, args.model) == ("serve", "0.0.0.0", "tiny")
    assert str(args.port) == dict(final)["EXPOSE"]
    health = dict(final)["HEALTHCHECK"].split("CMD ")[1]
    code = json.loads(health)[2]
    ast.parse(code)
    url = re.search(r"http://127.0.0.1:(\d+)(/\w+)", code)
    assert url is not None
    assert url.groups() == (str(args.port), "/health")
    assert "/health" in OPEN_PATHS
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {each for kind, rest in steps if kind == "COPY" and "--from" not in rest
              for each in rest.split()[:-1]}  # fmt: skip
    assert kept == copied


def unit() -> configparser.ConfigParser:
    """The unit; a name that occurs again is numbered, because systemd takes all."""
    numbers = iter(range(1000))
    lines = [
        f"{line.partition('=')[0]}#{next(numbers)}={line.partition('=')[2]}"
        if "=" in line and not line.startswith("#") else line
        for line in (DEPLOY / "minillm.service").read_text().splitlines()
    ]  # fmt: skip
    made = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes="#")
    made.optionxform = str  # type: ignore[assignment,method-assign]
    made.read_string("\n".join(lines))
    return made


def test_the_unit_starts_a_valid_command_and_is_hardened():
    made = unit()
    assert set(made) >= {"Unit", "Service", "Install"}
    values = [(name.partition("#")[0], value) for name, value in made["Service"].items()]
    single = dict(values)
    variables = {}
    for name, value in values:
        if name == "Environment":
            quoted = re.findall(r'"([^"]*)"', value) or value.split()
            variables |= dict(each.split("=", 1) for each in quoted)
    command = single["ExecStart"]
    for name, value in variables.items():
        command = command.replace(f"${name}", value)
    args = build_parser().parse_args(command.split()[1:])
    assert (args.command, args.host, args.port, args.model) == ("serve", "127.0.0.1", 8000, "tiny")
    assert float(single["TimeoutStopSec"]) > args.shutdown_timeout
    for name in (
        "NoNewPrivileges",
        "PrivateTmp",
        "ProtectHome",
        "DynamicUser",
        "RestrictNamespaces",
    ):
        assert single[name] == "yes", name
    assert single["ProtectSystem"] == "strict"
    assert single["CapabilityBoundingSet"] == ""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "minillm.service").read_text()
    copy = tmp_path / "minillm.service"
    copy.write_text(text.replace("/opt/minillm/bin/minillm", shutil.which("true") or ""))
    command = ["systemd-analyze", "verify", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_the_key_may_come_from_the_environment(settings_of, monkeypatch):
    for key, options, keys in (
        ("secret", [], ("secret",)),
        ("secret", ["--api-key", "a", "--api-key", "b"], ("a", "b")),
        ("", [], ()),
    ):
        monkeypatch.setenv("MINILLM_API_KEY", key)
        assert settings_of(*options).api_keys == keys


# ---- OpenAPI -----------------------------------------------------------------------------------


def references(part: Any) -> Iterator[str]:
    """Every reference in a document."""
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for each in part.values():
            yield from references(each)
    elif isinstance(part, list):
        for each in part:
            yield from references(each)


def test_the_openapi_document_is_complete_and_its_references_exist(app):
    made = app.openapi()
    routes = {
        route.path.replace(":path", "")
        for route in app.routes
        if route.path not in ("/openapi.json", "/")  # the document itself, and a page
    }
    assert set(made["paths"]) == routes
    names = []
    for path, method, operation in openapi.operations(made):
        assert method in HTTP_METHODS
        names.append(operation["operationId"])
        assert operation["description"], path
        assert set(operation["responses"]) == {"200", "default"}
        inside = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
        assert inside == set(re.findall(r"{(\w+)}", path))
        assert ("requestBody" in operation) == (method == "post")
    assert len(set(names)) == len(names)
    for reference in references(made):
        place = made
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    assert "$defs" not in json.dumps(made)
    fields = made["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "stream", "n", "logprobs"} <= set(fields)


def test_the_document_says_what_each_route_replies(app):
    made = app.openapi()
    for path, _, operation in openapi.operations(made):
        kinds, more = set(operation["responses"]["200"]["content"]), set()
        if path in ("/v1/completions", "/v1/chat/completions"):
            more = {"text/event-stream"}
        expected = {"/metrics": {"text/plain"}, "/debug/trace": {"application/jsonl"}}
        assert kinds == expected.get(path, {"application/json"}) | more, path
        assert ("security" in operation) == (path == "/health"), path  # it needs no key
        query = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
        assert query == (["last"] if path == "/debug/trace" else []), path


def test_the_document_is_valid_openapi(app):
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(app.openapi())
