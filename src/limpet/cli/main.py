"""The command line: the table of commands, and what an error or an interrupt does to the exit code.

0 done · 1 a check failed · 2 something to mend in what was asked · 130 interrupted."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

from limpet import __version__
from limpet.errors import LimpetError, Remark, unknown

COMMANDS = {  # in the order in which one meets them
    "sample": "texts from a model under a sampler",
    "compare": "samplers on the same randomness, in one table",
    "samplers": "every sampler, and what the parameters of one take",
    "score": "every metric for texts made by anyone",
    "watch": "a sample comes into being in the terminal",
    "view": "recorded paths as one self-contained page",
    "serve": "the playground in a browser",
    "tune": "the best parameters for a model, a judge and a number of calls",
    "study": "the paper's tables and figures, or a study of your own",
    "audit": "what the paper measures inside a path",
    "reproduce": "all that the paper measures, in one evening",
    "theory": "the paper's propositions, evaluated exactly",
    "train": "a model, its distillation or a judge, from text files",
    "check": "whether a model or a sampler keeps the contract",
    "info": "what a model is and where it came from",
    "bench": "what generations cost on this machine",
    "doctor": "what is installed, and whether this machine draws right",
}
HELP = "\n".join([
    "usage: limpet COMMAND ...", "",
    *(f"  {name:<9} {words}" for name, words in COMMANDS.items()), "",
    '  limpet sample --prompt "The sea" --n 2',
    '  limpet compare --arm native --arm "crs budget=.25"', "",
    "limpet COMMAND --help has its options and examples; limpet --version",
])  # fmt: skip

# Turns that a thread waits for another before it gives its processor back. OpenMP's own 300,000 pay on an idle machine;
# on a busy one those that wait keep those that they wait for from their work, and a call takes ten times as long.
SPIN = "1000"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; only that command's module is imported, and none where there is none to run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "--version"):
        print(f"limpet {__version__}" if first == "--version" else HELP)
        return 0
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read when torch is loaded
    others = warnings.showwarning

    def remarked(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        """A remark of ours is one line, without the place in the code."""
        if issubclass(category, Remark):
            print(f"limpet: {message}", file=sys.stderr)
        else:
            others(message, category, filename, lineno, *rest)

    warnings.showwarning = remarked  # type: ignore[assignment]
    try:
        if first not in COMMANDS:
            raise unknown("there is no command", first, COMMANDS)
        import tyro

        command = importlib.import_module(f"limpet.cli.{first}").run
        code = tyro.extras.subcommand_cli_from_dict({first: command}, prog="limpet", args=arguments)
        sys.stdout.flush()  # a full disk is told here, not when all is over
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


if __name__ == "__main__":
    sys.exit(main())
