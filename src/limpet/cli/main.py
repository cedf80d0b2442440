"""The command line: the table of commands, and the exit codes of errors and interrupts.

0 done · 1 a check failed · 2 an error in the request · 130 interrupted."""

import errno
import importlib
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

from limpet import __version__
from limpet.cli.streams import prepare_streams
from limpet.errors import LimpetError, LimpetWarning, unknown_name

COMMANDS = {  # in the order in which a user meets them
    "sample": "draw texts from a model",
    "infill": "draw what stands between two texts",
    "compare": "samplers on the same random numbers, in one table",
    "samplers": "every sampler, and the parameters of one",
    "score": "every metric for texts of any origin",
    "watch": "a sample takes shape in the terminal",
    "view": "recorded trajectories as one self-contained page",
    "serve": "the playground in a browser, and an OpenAI-compatible API",
    "bulk": "many samples, into a folder, resumably",
    "tune": "the best parameters for a model, a judge and a number of calls",
    "study": "a study of your own: samplers, models and metrics",
    "paper": "the paper: study, audit, theory, reproduce",
    "train": "a model, its distillation or a judge, from text files",
    "check": "whether a model or a sampler keeps limpet's contract",
    "info": "what a model is and where it came from",
    "bench": "what sampling costs on this machine",
    "doctor": "what is installed, and whether this machine draws correctly",
}
PAPER = {
    "study": "the paper's tables and figures",
    "audit": "what the paper measures inside a trajectory",
    "theory": "the paper's propositions, evaluated exactly",
    "reproduce": "everything that the paper measures, in one evening",
}


def _help(usage: str, commands: dict[str, str], examples: list[str]) -> str:
    listed = [f"  {name:<9} {description}" for name, description in commands.items()]
    ending = f"{usage} COMMAND --help has its options and examples; limpet --version"
    return "\n".join([f"usage: {usage} COMMAND ...", "", *listed, "", *(f"  {line}" for line in examples), "", ending])


HELP = _help(
    "limpet",
    COMMANDS,
    ['limpet sample --prompt "The sea" --n 2', 'limpet compare --sampler native --sampler "crs budget=.25"'],
)
PAPER_HELP = _help("limpet paper", PAPER, ["limpet paper study list", "limpet paper reproduce --rehearse"])

# How often a waiting thread checks before it gives up its processor. OpenMP's own 300,000 pays on an idle machine. On a
# busy one the waiting threads keep the working ones from the processor, and a call takes ten times as long.
SPIN = "1000"
NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. Only that command's module is imported; help imports none."""
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    first = arguments[0] if arguments else "--help"
    second = arguments[1] if len(arguments) > 1 else "--help"
    if first in ("-h", "--help", "--version"):
        print(f"limpet {__version__}" if first == "--version" else HELP)
        return 0
    if first == "paper" and second in ("-h", "--help"):
        print(PAPER_HELP)
        return 0
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read when torch is loaded
    others = warnings.showwarning

    def remarked(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        """Print a remark of limpet as one line, without its place in the code."""
        if issubclass(category, LimpetWarning):
            print(f"limpet: {message}", file=sys.stderr)
        else:
            others(message, category, filename, lineno, *rest)

    warnings.showwarning = remarked  # type: ignore[assignment]
    try:
        code = _run(first, arguments) if first != "paper" else _run(second, arguments[1:], "limpet paper", PAPER)
        sys.stdout.flush()  # a full disk is reported here, not at exit
    except LimpetError as error:
        print(f"limpet: {error}", file=sys.stderr)
        with suppress(OSError):
            sys.stdout.flush()
        return 2
    except KeyboardInterrupt:
        print("limpet: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe left: `limpet sample | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno in NO_PATH and error.filename is not None:
            sentence = LimpetError(f"{error.filename} cannot be used ({error.strerror}): check the path")
            print(f"limpet: {sentence}", file=sys.stderr)
            return 2
        if error.errno not in UNWRITABLE:
            raise
        where = f" to {error.filename}" if error.filename else ""
        print(f"limpet: nothing more can be written{where} ({error.strerror}): what was finished is kept; make room, "
              "or name another place", file=sys.stderr)  # fmt: skip
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what still waits for standard output has nowhere to go
        return 2
    finally:
        warnings.showwarning = others
    return int(code or 0)


def _run(name: str, arguments: list[str], program: str = "limpet", commands: dict[str, str] = COMMANDS) -> Any:
    """Import a command's module and call it with its arguments."""
    if name not in commands:
        raise unknown_name(f"{program} has no command", name, commands)
    from limpet.cli.parsing import call

    package = "limpet.cli" if program == "limpet" else "limpet.cli.paper"
    return call(importlib.import_module(f"{package}.{name}").run, f"{program} {name}", arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
