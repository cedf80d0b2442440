"""`limpet check MODEL`: whether a model and samplers, your own or built in, keep limpet's contract."""

import tyro

from limpet import samplers
from limpet.cli.common import DEFAULT_LOADING, Json, Length, Loading, Model, SamplerTexts, out, show
from limpet.conformance import NFE, CheckResult, model_rows, sampler_rows, verdict


def run(
    model: tyro.conf.Positional[Model] = "exact:words",
    /,
    *,
    sampler: SamplerTexts = (),
    nfe: int = NFE,
    length: Length = None,
    loading: Loading = DEFAULT_LOADING,
    json: Json = False,
) -> int:
    """Check a model, and samplers on it, against what every part of limpet relies on. Exit code 1 if a check fails.

    By default a model with a large vocabulary is checked on shorter sequences than its own.

    $ limpet check ./my.py:factory
    $ limpet check --sampler ./mine.py:Mine
    $ limpet check mini --sampler "crs budget=.25" --json

    Args:
        nfe: network calls of every sampler that does not set its own
    """
    denoiser = loading.load(model)

    def say(line: str) -> None:
        if not json:
            out.print(line, markup=False)

    found: list[tuple[str | None, CheckResult]] = []
    for subject in (None, *(sampler or samplers.available())):
        say("\nthe model" if subject is None else f"\nsampler {subject}")
        for row in model_rows(denoiser, length) if subject is None else sampler_rows(denoiser, subject, nfe, length):
            found.append((subject, row))
            say(f"{'ok' if row.ok else 'FAILED':<7} {row.what}: {row.found}")
    summary = verdict(denoiser, [row for _, row in found])
    checks = [{"sampler": subject, **row._asdict()} for subject, row in found]
    document = {"model": denoiser.name, "digest": denoiser.digest, "checks": checks, "verdict": summary}
    show(json, document, [f"\n{summary}"])
    return 0 if all(row.ok for _, row in found) else 1
