"""Run the default tests several times in a row under conditions that tests often forget.

    python tools/hard_conditions.py                      # three times
    python tools/hard_conditions.py --runs 1 tests/cli   # these tests once

Every run is in random order, beside two busy loops, in a background job of `sh` (which ignores interrupts), with an odd
time zone and locale and without HOME. Root runs the tests as the user `nobody`, who must be able to read the tree and
the interpreter."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOBODY = 65534
SHOWN = 3  # closing lines of each run


def environment(folder: str) -> dict[str, str]:
    """The few variables that the tests get: no HOME, no USER, a temporary folder, and what an odd machine has set."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
    odd = {"TZ": "Asia/Kathmandu", "LANG": "C", "LC_ALL": "C"}
    return {**kept, **odd, "TMPDIR": folder}


def command(arguments: list[str]) -> list[str]:
    """pytest as the background job of a shell, and as another user where this one is root."""
    tests = shlex.join([sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *arguments])
    user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --no-new-privs " if os.getuid() == 0 else ""
    return ["sh", "-c", f"{user}{tests} & wait $!"]


def run(arguments: list[str], deadline: float, log: Path) -> int | None:
    """Run the tests once beside two busy loops.

    arguments: of pytest. deadline: seconds after which everything is killed. log: the file of what the tests print.
    Returns the exit code, None after the deadline."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, log.open("w") as output:
        os.chmod(folder, 0o777)
        tests = subprocess.Popen(
            command(arguments), cwd=ROOT, env=environment(folder), stdout=output, stderr=output, start_new_session=True
        )
        try:
            return tests.wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if tests.poll() is None:
                os.killpg(tests.pid, signal.SIGKILL)
            for loop in loops:
                loop.kill()
                loop.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="a folder for what they print")
    options, arguments = parser.parse_known_args()
    failed = 0
    for number in range(1, options.runs + 1):
        log, began = options.logs / f"hard-conditions-{number}.log", time.monotonic()
        code = run(arguments, options.deadline, log)
        failed += code != 0
        outcome = "passed" if code == 0 else "killed at its deadline" if code is None else f"failed ({code})"
        print(f"run {number} {outcome} after {time.monotonic() - began:.0f} s: {log}")
        print(*(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-SHOWN:]), sep="\n", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
