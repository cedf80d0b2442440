"""The container's files, which are read here and not built, and what `limpet serve --api` makes of them."""

import functools
import json
import re
import shlex
import tomllib
from pathlib import Path

import yaml

from limpet.cli import main, parsing, serve

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def options_of(arguments):
    """What `limpet serve` would be called with."""
    return parsing.call(functools.wraps(serve.run)(lambda **options: options), "limpet serve", arguments)


def test_the_file_and_the_key_reach_the_server(tmp_path, unserved, monkeypatch):
    monkeypatch.setenv("LIMPET_API_KEY", "k")
    file = tmp_path / "server.toml"
    file.write_text('api = true\nmodels = ["exact:words"]\n[limit]\nbatch = 3\n')
    assert main.main(["serve", "--config", str(file)]) == 0
    (app,) = unserved
    paths = {route.path for route in app.routes}
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/metrics", "/health", "/ready"} <= paths
    assert "/" not in paths
    assert app.state.queue.limits.batch == 3


def instructions():
    """(instruction, rest) of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.M)
    return [line.split(maxsplit=1) for line in text.splitlines() if line]


def test_the_image_installs_by_name_and_starts_the_server():
    found = instructions()
    for name, rest in found:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
            allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
            assert all(f"!{source}" in allowed for source in rest.split()[:-1]), rest
        if name == "RUN":  # nothing else could fetch
            assert shlex.split(rest)[0] in ("pip", "useradd"), rest
    (install,) = [shlex.split(rest) for name, rest in found if rest.startswith("pip ")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.fullmatch(r"\.\[([\w,-]+)\]", install[-1])[1].split(",")
    assert {"serve", *extras} <= set(project["optional-dependencies"])
    assert (ROOT / install[install.index("--constraint") + 1]).exists()
    values = dict(found)
    program, command, *fixed = json.loads(values["ENTRYPOINT"])
    assert project["scripts"][program] == "limpet.cli.main:main"
    assert command in main.COMMANDS
    options = options_of([*fixed, *json.loads(values["CMD"])])
    assert (options["api"], options["host"], str(options["port"])) == (True, "0.0.0.0", values["EXPOSE"])
    assert f":{values['EXPOSE']}/health" in values["HEALTHCHECK"]


def test_the_service_reads_its_file():
    services = yaml.safe_load((DOCKER / "compose.yml").read_text())
    service = services["services"]["limpet"]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
    mounted = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    assert {name for name in mounted.values() if not name.startswith(".")} == set(services["volumes"])
    option, inside = service["command"]
    options = options_of([option, str(DOCKER / mounted[inside])])
    outside, port = service["ports"][0].rsplit(":", 1)
    assert options["port"] == int(port)
    assert outside.startswith("127.0.0.1:")  # a key is no encryption
    assert options["api"]
    assert int(service["stop_grace_period"].removesuffix("s")) > options["limits"].grace
    assert ":?" in service["environment"]["LIMPET_API_KEY"]  # compose stops where it is missing
