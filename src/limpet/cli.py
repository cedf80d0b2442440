"""The command line: the table of commands, and what an error or an interrupt does to the exit code.

0 done · 1 a check failed · 2 something to mend in what was asked · 130 interrupted."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from contextlib import suppress

COMMANDS = (
    "sample", "compare", "doctor", "check", "info", "samplers", "score", "study", "theory", "train", "watch", "view",
    "serve", "audit", "bench", "tune", "reproduce",
)  # fmt: skip


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; only that command's module is imported, unless help on all is asked for."""
    import tyro

    from limpet.errors import LimpetError

    arguments = sys.argv[1:] if arguments is None else arguments
    names = [arguments[0]] if arguments and arguments[0] in COMMANDS else COMMANDS
    try:
        functions = {name: importlib.import_module(f"limpet.commands.{name}").run for name in names}
        code = tyro.extras.subcommand_cli_from_dict(
            functions, prog="limpet", description="Sample uniform-state discrete diffusion models.", args=arguments
        )
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


if __name__ == "__main__":
    sys.exit(main())
