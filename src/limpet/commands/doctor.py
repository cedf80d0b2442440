"""`limpet doctor`: what this machine runs, and whether every step backend draws from the exact law on it."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from limpet.commands import Json, native_bfloat16, show
from limpet.denoisers.sources import source
from limpet.engine.steps import Backend, backends, trial
from limpet.engine.streams import philox
from limpet.engine.support import Support
from limpet.samplers import CRS
from limpet.samples import sample

PACKAGES = ("limpet", "torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "transformers", "triton")
LAWS = ((0.5, 0.2, 0.2, 0.1, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0), (0.2, 0.2, 0.2, 0.2, 0.2))
PHILOX = "d16cfe09 94fdcceb 5001e420 24126ea1"  # the generator's published answer for the digits of pi
LEVEL = 1e-6  # a sound backend fails one check in a million


def run(json: Json = False) -> int:
    """Print versions and devices, and check the arithmetic that every result rests on. Exit code 1 if a check fails.

    $ limpet doctor
    $ limpet doctor --json
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    checks = [generator_check(device) for device in devices] + [calls_check()]
    for device in devices:
        checks += [chi_square_check(name, backend, device) for name, backend in backends(device).items()]
    found, facts_of = versions(), [device_facts(device) for device in devices]
    machine = [(facts["device"], f"{facts['name']}, bfloat16 {facts['bfloat16']}") for facts in facts_of]
    checked = [("ok" if one["ok"] else "FAILED", f"{one['check']}: {one['found']}") for one in checks]
    lines = (f"{head:<16} {words}" for head, words in [*found.items(), *machine, *checked])
    show(json, {"versions": found, "devices": facts_of, "checks": checks}, lines)
    return 0 if all(check["ok"] for check in checks) else 1


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def device_facts(device: str) -> dict[str, Any]:
    if device == "cuda":
        bfloat16 = "native" if torch.cuda.is_bf16_supported() else "none"
        return {"device": device, "name": torch.cuda.get_device_name(), "bfloat16": bfloat16}
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {"device": device, "name": name, "bfloat16": "native" if native_bfloat16() else "emulated"}


def generator_check(device: str) -> dict[str, Any]:
    a, b, c, d = torch.tensor([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], device=device)
    words = philox((a, b, c, d), (0xA4093822, 0x299F31D0))
    found = " ".join(f"{int(word):08x}" for word in words)
    return {"check": f"Philox 4x32-10 on {device}", "found": found, "ok": found == PHILOX}


def calls_check() -> dict[str, Any]:
    made = sample(source("exact:words"), CRS(nfe=6), n=1)
    return {"check": "network calls at nfe 6", "found": made.nfe, "ok": made.nfe == 6}


def chi_square_check(name: str, backend: Backend, device: str) -> dict[str, Any]:
    """Draws of one reverse step against the dense law: full, tied and point-mass laws, with and without top-p."""
    worst = min(
        trial.fit(backend, torch.tensor(law, dtype=torch.float64), Support(top_p), seed=row, device=device)
        for row, law in enumerate(LAWS)
        for top_p in (1.0, 0.65)
    )
    return {"check": f"{name} step on {device}, chi-square", "found": f"smallest p {worst:.2g}", "ok": worst > LEVEL}
