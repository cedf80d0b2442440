"""How often a committed token is wrong on forward states, against noise: proposition 2 in practice."""

from collections.abc import Iterator, Sequence

from limpet.evaluation import paired
from limpet.experiments import Panel, ProbeValue, Results, above, estimate_series, not_below
from limpet.models import Denoiser
from limpet.paper.studies import audits
from limpet.paper.studies.audits import estimate_of
from limpet.paper.studies.published import Claims
from limpet.paper.studies.selection import commit_count, model_view
from limpet.paper.studies.trajectories import ForwardSettings, clean_texts, forward_states, text_positions

PRESETS = audits.presets("risk", ForwardSettings)


def audit(
    models: Sequence[Denoiser], settings: ForwardSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    for model in models:
        clean = clean_texts(model, settings, index, seeds)
        inside, count = text_positions(model, clean), commit_count(settings, clean.shape[1])
        everywhere, committed = int(inside.sum()), count * settings.n
        before = None
        states = forward_states(clean, settings.times, model, seeds[index])
        for t, noisy in zip(settings.times, states, strict=True):
            top, deficit, chosen = model_view(model, noisy, t, inside, count, settings.spacing)
            wrong = (top != clean).double()
            values = {}
            for prefix, where, events in (("", inside, everywhere), ("committed ", chosen, committed)):
                for quantity, what in (("error", wrong), ("deficit", deficit)):
                    values[prefix + quantity] = float(100 * what[where].mean())
                    yield ProbeValue(model.name, prefix + quantity, {"t": t}, values[prefix + quantity], "%", events)
            if before is not None:
                rise = values["committed error"] - before
                yield ProbeValue(model.name, "committed error, rise", {"t": t}, rise, "%", committed)
            before = values["committed error"]


cells = audits.probe_each(audit)


def claims(results: Results, preset: audits.AuditPreset[ForwardSettings]) -> Claims:
    """Claims about both checkpoints: the error rises from the first time to the last, and in no step does it fall."""
    times, found = preset.settings.times, []
    for model in (*audits.models_beside(results, "Duo"), *audits.models_beside(results, "Duo-distilled")):
        first, last = (estimate_of(results, "committed error", model, t=t).values for t in (times[0], times[-1]))
        found.append(above(f"committed error, t={times[-1]:g} minus t={times[0]:g}, {model}", paired(last, first)))
        for t in times[1:]:
            rise = estimate_of(results, "committed error, rise", model, t=t)
            found.append(not_below(f"committed error, rise to t={t:g}, {model}", rise))
    return {"falls": found}


def panels(results: Results, preset: audits.AuditPreset[ForwardSettings]) -> Iterator[Panel]:
    """Error and deficit over all positions, and over the committed ones."""
    times = preset.settings.times
    for title, prefix in (("all positions", ""), ("committed positions", "committed ")):
        lines = []
        for i, model in enumerate(audits.models_of(results, "error")):
            for measure in ("error", "deficit"):
                estimates = [estimate_of(results, prefix + measure, model, t=t) for t in times]
                is_deficit = measure == "deficit"
                lines.append(estimate_series(f"{model}, {measure}", times, estimates, style=i, open=is_deficit))
        yield Panel(title, "t", "%", lines)
