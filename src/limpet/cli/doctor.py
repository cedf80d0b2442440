"""`limpet doctor`: what is installed, and whether every backend draws from the exact distribution on this machine."""

import importlib.metadata
import platform
import re
from textwrap import fill
from typing import Any

import torch

from limpet import __version__
from limpet.cli.common import Json, has_native_bfloat16, out, show
from limpet.diffusion.backends import Backend, backends, testing
from limpet.diffusion.rng import philox
from limpet.diffusion.truncation import Support
from limpet.generation import sample
from limpet.models.exact_sources import source

DISTRIBUTIONS = ((0.5, 0.2, 0.2, 0.1, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0), (0.2, 0.2, 0.2, 0.2, 0.2))
PHILOX = "d16cfe09 94fdcceb 5001e420 24126ea1"  # the generator's published answer for the digits of pi
LEVEL = 1e-6  # a correct backend fails one check in a million


def run(json: Json = False) -> int:
    """Print versions and devices, and check the arithmetic that every result rests on. Exit code 1 if a check fails.

    $ limpet doctor
    $ limpet doctor --json
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    checks = [generator_check(device) for device in devices] + [calls_check()]
    for device in devices:
        checks += [chi_square_check(name, backend, device) for name, backend in backends(device).items()]
    found, extras, facts_of = versions(), extras_found(), [device_facts(device) for device in devices]
    machine = [(facts["device"], f"{facts['name']}, bfloat16 {facts['bfloat16']}") for facts in facts_of]
    checked = [("ok" if one["ok"] else "FAILED", f"{one['check']}: {one['found']}") for one in checks]
    optional = [(f"[{name}]", _extra_text(name, parts)) for name, parts in extras.items()]
    listed = [*found.items(), *optional, *machine, *checked]
    lines = (fill(f"{head:<16} {words}", out.width, subsequent_indent=" " * 17) for head, words in listed)
    show(json, {"versions": found, "extras": extras, "devices": facts_of, "checks": checks}, lines)
    return 0 if all(check["ok"] for check in checks) else 1


def versions() -> dict[str, str]:
    """The versions of Python, limpet and its required packages."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "limpet": __version__}
    return found | {name: version(name) or "not installed" for name in required("")}


def extras_found() -> dict[str, dict[str, str | None]]:
    """Every extra of limpet with its packages: name -> version, None where it is not installed."""
    listed = importlib.metadata.metadata("limpet").get_all("Provides-Extra") or []
    return {extra: {name: version(name) for name in required(extra)} for extra in listed}


def required(extra: str) -> list[str]:
    """The packages that limpet requires, always ("") or for an extra."""
    found = []
    for line in importlib.metadata.requires("limpet") or []:
        name, _, condition = line.partition(";")
        of = re.search(r"extra == ['\"](.+?)['\"]", condition)
        if (of[1] if of else "") == extra and not name.startswith("limpet"):
            found.append(re.split(r"[^\w.-]", name.strip())[0])
    return found


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra_text(extra: str, parts: dict[str, str | None]) -> str:
    missing = [name for name, found in parts.items() if found is None]
    if missing:
        return f"lacks {', '.join(missing)}: pip install 'limpet[{extra}]'"
    return ", ".join(f"{name} {found}" for name, found in parts.items())


def device_facts(device: str) -> dict[str, Any]:
    """A device's name, and how it computes in bfloat16."""
    if device == "cuda":
        bfloat16 = "native" if torch.cuda.is_bf16_supported() else "none"
        return {"device": device, "name": torch.cuda.get_device_name(), "bfloat16": bfloat16}
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {"device": device, "name": name, "bfloat16": "native" if has_native_bfloat16() else "emulated"}


def generator_check(device: str) -> dict[str, Any]:
    """The random number generator against its published answer."""
    a, b, c, d = torch.tensor([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], device=device)
    words = philox((a, b, c, d), (0xA4093822, 0x299F31D0))
    found = " ".join(f"{int(word):08x}" for word in words)
    return {"check": f"Philox 4x32-10 on {device}", "found": found, "ok": found == PHILOX}


def calls_check() -> dict[str, Any]:
    """Whether a sampler makes as many network calls as it was asked for."""
    samples = sample(source("exact:words"), "crs nfe=6", n=1)
    return {"check": "network calls at nfe 6", "found": samples.nfe, "ok": samples.nfe == 6}


def chi_square_check(name: str, backend: Backend, device: str) -> dict[str, Any]:
    """Draws of one reverse step against the dense distribution, for full, tied and point-mass predictions, with and
    without top-p."""
    worst = min(
        testing.p_value(backend, torch.tensor(probs, dtype=torch.float64), Support(top_p), seed=row, device=device)
        for row, probs in enumerate(DISTRIBUTIONS)
        for top_p in (1.0, 0.65)
    )
    return {"check": f"{name} step on {device}, chi-square", "found": f"smallest p {worst:.2g}", "ok": worst > LEVEL}
