"""Standard streams: closed ones, and those whose encoding lacks some letters."""

import codecs
import io
import json
import os
import sys


def prepare_streams() -> None:
    """Replace closed standard streams by the null device, and escape what standard output's encoding lacks.

    Without that, a file that is opened later would take a closed stream's place and receive what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and not _is_utf8(sys.stdout.encoding):
        sys.stdout.reconfigure(errors="json")


def print_json(text: str) -> None:
    """Print JSON on standard output. JSON is UTF-8, so for an output in another encoding it is written in ASCII."""
    encoding = sys.stdout.encoding or "utf-8"  # a buffer in memory has none
    sys.stdout.write(text if _is_utf8(encoding) else text.encode("ascii", "json").decode())


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    """What cannot be encoded, as JSON writes it in ASCII: a handler of encoding errors."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("json", _json_escape)
