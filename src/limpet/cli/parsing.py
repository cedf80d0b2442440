"""Calls a command with the options of a command line and of a TOML file (`--config FILE`)."""

import inspect
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from textwrap import fill
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from limpet.cli.common import UNSET
from limpet.errors import LimpetError
from limpet.files import Toml

CONFIG = "--config"
ABOUT_CONFIG = "Options may also be in a TOML file, given as --config FILE.\n\n"
GROUPS = re.compile(r"\n(╭─)? \w+ options [─ ]*╮?\n.*", re.S)  # of options: a command's own text describes them
EMPTY = (None, False, ())  # defaults that help does not print: the option is simply left out


def call(command: Callable[..., Any], program: str, arguments: Sequence[str]) -> Any:
    """Call a command as `program` with command-line arguments; `--help` prints its options and examples.

    What the command line gives comes before what `--config FILE` gives."""
    hints = get_type_hints(command, include_extras=True)
    arguments = with_config(list(arguments), hints)
    for name, param in inspect.signature(command).parameters.items():
        if param.default in EMPTY:
            hints[name] = Annotated[hints[name], UNSET]
    command.__annotations__ = hints
    command.__doc__ = help_text(inspect.getdoc(command) or "")
    markers = tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName
    if not {"-h", "--help"} & set(arguments):
        return tyro.cli(command, prog=program, args=arguments, config=markers)
    shown, width = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding), shutil.get_terminal_size().columns
    try:
        with redirect_stdout(shown):
            tyro.cli(command, prog=program, args=["--help"], config=markers)
    finally:
        shown.seek(0)
        text = GROUPS.sub("", re.sub(r"\n{3,}", "\n\n", shown.read()))
        print("\n".join(fill(line, width) if len(line) > width else line for line in text.rstrip().split("\n")))


def help_text(doc: str) -> str:
    """A docstring whose descriptions of options are one line each, so that they wrap at words alone."""
    about, args, options = doc.partition("\nArgs:\n")
    if CONFIG not in about:
        about = re.sub(r"^\$ ", lambda found: ABOUT_CONFIG + found[0], about, count=1, flags=re.M)
    return about + args + re.sub(r"\n {8,}", " ", options)


def with_config(arguments: list[str], hints: Mapping[str, Any]) -> list[str]:
    """Arguments in which `--config FILE` is replaced by the options in the file that are not given otherwise."""
    at = next((i for i, one in enumerate(arguments) if one.partition("=")[0] == CONFIG), None)
    if at is None:
        return arguments
    _, equals, path = arguments[at].partition("=")
    if not equals:
        path = arguments[at + 1] if at + 1 < len(arguments) else ""
    if not path or path.startswith("--"):
        raise LimpetError("--config takes a TOML file of options, such as nfe = 16")
    rest = arguments[:at] + arguments[at + (1 if equals else 2) :]
    on_line = {one.partition("=")[0].replace("_", "-") for one in rest if one.startswith("--")}
    for option, value in flat(Toml(path, "name a TOML file of options").content):
        if f"--{option}" not in on_line:
            rest += written(option, value, hints.get(option.replace("-", "_")))
    return rest


def flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The names of options, with dots between tables, and their values."""
    for key, value in table.items():
        name = before + key.replace("_", "-")
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def written(option: str, value: Any, hint: Any) -> list[str]:
    """An option as command-line arguments."""
    if isinstance(value, bool) and (hint is bool or bool in get_args(hint)[:1]):
        return [f"--{option}"] * value  # a flag
    values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if tyro.conf.UseAppendAction in get_args(hint):
        return [word for one in values for word in (f"--{option}", one)]
    return [f"--{option}", *values]
