"""A command in a terminal of so many columns, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios

import forked

COLUMNS, LINES = 80, 24


def in_terminal(*arguments: str, cwd=None, columns: int = COLUMNS) -> str:
    """What a command shows in a terminal of so many columns, without the codes that colour and move."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    size = {"COLUMNS": str(columns), "LINES": str(LINES)}
    process = forked.start([*arguments], [theirs] * 3, cwd, {**os.environ, "TERM": "xterm", **size})
    os.close(theirs)
    shown = b""
    while True:
        try:
            if not (part := os.read(ours, 65536)):
                break
        except OSError:  # the other end is closed
            break
        shown += part
    os.close(ours)
    process.join()
    assert process.exitcode == 0, shown.decode()
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")


def fits(shown: str, columns: int = COLUMNS) -> None:
    """Assert that no line is longer than the terminal is wide."""
    lines = [part for line in shown.split("\n") for part in line.split("\r")]
    assert not [line for line in lines if len(line) > columns]


def piped(*arguments: str, cwd=None) -> tuple[str, str]:
    """What a command writes to two pipes: no codes of a terminal."""
    done = forked.run(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done.stdout, done.stderr
