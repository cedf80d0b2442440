"""The options of `limpet serve` in a TOML file, and the container's files, which are read here and not built."""

import functools
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import tyro
import yaml

from limpet.cli import main, serve
from limpet.errors import LimpetError

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def options_of(arguments):
    """What `limpet serve` would be called with."""
    reader = functools.wraps(serve.run)(lambda **options: options)
    return tyro.cli(reader, args=serve.with_config(["serve", *arguments])[1:])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(
        'port = 9000\nmodels = ["mini", "exact:words"]\nsampler = ["native", "crs budget=.25"]\n'
        'proxy = ["10.0.0.0/8"]\napi = true\naccess_log = true\nplayground = false\nprecision = "auto"\n'
        "[limit]\nbatch = 32\nwait = 0.5\n"
    )
    return str(path)


def test_a_file_sets_every_kind_of_option(file):
    options = options_of(["--config", file])
    limits = options.pop("limits")
    assert (limits.batch, limits.wait, limits.seconds) == (32, 0.5, 120)
    assert options["models"] == ("mini", "exact:words")
    assert options["sampler"] == ("native", "crs budget=.25")
    assert options["proxy"] == ("10.0.0.0/8",)
    assert (options["port"], options["api"], options["access_log"]) == (9000, True, True)
    assert (options["playground"], options["loading"].precision) == (False, "auto")


def test_the_command_line_comes_after_the_file(file):
    for arguments in (["--port", "1", f"--config={file}", "--no-api"], [f"--config={file}", "--no-api", "--port=1"]):
        options = options_of([*arguments, "--models", "sudoku", "--limit.batch", "8"])
        assert (options["port"], options["api"], options["models"]) == (1, False, ("sudoku",))
        assert (options["limits"].batch, options["limits"].wait) == (8, 0.5)


def test_a_wrong_file_is_refused(file, capsys):
    for text, named in (("prt = 1", "--prt"), ('port = "x"', "--port"), ("[limit]\nbach = 1", "--limit.bach")):
        Path(file).write_text(text)
        with pytest.raises(SystemExit):
            options_of(["--config", file])
        assert named in capsys.readouterr().err
    Path(file).write_text("port = ")
    with pytest.raises(LimpetError, match="is not TOML"):
        options_of(["--config", file])


def test_the_file_and_the_key_reach_the_server(file, unserved, monkeypatch, capsys):
    monkeypatch.setenv("LIMPET_API_KEY", "k")
    Path(file).write_text('api = true\nmodels = ["exact:words"]\njudge = "none"\n')
    assert main.main(["serve", "--config", file]) == 0
    paths = {route.path for route in unserved[0].routes}
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/metrics", "/health", "/ready"} <= paths
    assert "/" not in paths


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
