"""Models and judges that stay loaded: each by name, once, on one device."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from limpet.evaluation import scoring
from limpet.evaluation.judges import Judge, load_judge
from limpet.experiments.study import Judging
from limpet.models import Denoiser
from limpet.models.duo import Precision
from limpet.models.loading import load


class Shelf:
    """What a worker keeps resident."""

    def __init__(
        self,
        device: str | None = None,
        precision: Precision = "float32",
        which: Mapping[str, str] = {},
    ) -> None:
        self.device, self.precision = device, precision
        self.which = which  # weights and revision, where they were told
        self._models: dict[str, Denoiser] = {}
        self._judges: dict[str, Judge] = {}

    def model(self, name: str) -> Denoiser:
        if name not in self._models:
            self._models[name] = load(name, device=self.device, precision=self.precision, **self.which)
        return self._models[name]

    def judge(self, name: str) -> Judge:
        if name not in self._judges:
            self._judges[name] = load_judge(name, device=self.device)
        return self._judges[name]

    def judges(self, wanted: Sequence[Judging], model: Denoiser) -> list[tuple[Judging, Judge]]:
        """Who judges a model's samples: those wanted, or else its own true distribution, where that is known."""
        if wanted:
            return [(one, self.judge(one.name)) for one in wanted]
        probs = scoring.judge_of(model, None)
        return [(Judging(probs.name), probs)]


def provenance(model: Denoiser) -> dict[str, Any]:
    """Where a result was made, as far as it is the same for every run on one machine."""
    from limpet import __version__

    gpu = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if gpu else f"{model.device.type} {platform.machine()}",
        "precision": model.precision,
        "limpet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
