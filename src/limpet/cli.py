"""The command line: the table of commands, and what an error or an interrupt does to the exit code.

0 done · 1 a check failed · 2 something to mend in what was asked · 130 interrupted."""

from __future__ import annotations

import ast
import errno
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from limpet import __version__
from limpet.errors import LimpetError

COMMANDS = (
    "sample", "compare", "doctor", "check", "info", "samplers", "score", "study", "theory", "train", "watch", "view",
    "serve", "audit", "bench", "tune",
)  # fmt: skip

DESCRIPTION = "Sample uniform-state discrete diffusion models. limpet --version says which limpet this is."
# Turns that a thread waits for another before it gives its processor back. OpenMP's own 300,000 pay on an idle machine;
# on a busy one those that wait keep those that they wait for from their work, and a call takes ten times as long.
SPIN = "1000"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; only that command's module is imported, and none where there is none to run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"limpet {__version__}")
        return 0
    import tyro

    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read when torch is loaded
    try:
        if arguments and arguments[0] in COMMANDS:
            functions = {arguments[0]: importlib.import_module(f"limpet.commands.{arguments[0]}").run}
        else:
            functions = {name: described(name) for name in COMMANDS}
        code = tyro.extras.subcommand_cli_from_dict(functions, prog="limpet", description=DESCRIPTION, args=arguments)
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
    return int(code or 0)


def described(name: str) -> Callable[[], None]:
    """What stands for a command in the help on all of them: its words, read off its file, which is not run."""
    file = Path(__file__).parent / "commands" / f"{name}.py"
    found = [one for one in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(one, ast.FunctionDef)]

    def command() -> None: ...

    command.__doc__ = next(ast.get_docstring(one, clean=False) for one in found if one.name == "run")
    return command


if __name__ == "__main__":
    sys.exit(main())
