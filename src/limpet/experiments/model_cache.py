"""Models and judges that stay loaded: each is loaded once by name, on one device."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from limpet.evaluation.checkers import Checker, find_checker
from limpet.evaluation.judges import Judge, load_judge, source_judge
from limpet.experiments.study import JudgeSpec
from limpet.models import Denoiser
from limpet.models.loading import load
from limpet.models.networks import Precision


class ModelCache:
    """The models and judges of one worker.

    device: where they run; default: a GPU if there is one. precision: what the models compute in.
    load_options: further arguments of `limpet.load`, such as the revision."""

    def __init__(
        self, device: str | None = None, precision: Precision = "float32", load_options: Mapping[str, str] = {}
    ) -> None:
        self.device, self.precision, self.load_options = device, precision, load_options
        self._models: dict[str, Denoiser] = {}
        self._judges: dict[str, Judge] = {}
        self._checkers: dict[str, Checker] = {}

    def model(self, name: str) -> Denoiser:
        """The model of this name, loaded on first use."""
        if name not in self._models:
            self._models[name] = load(name, device=self.device, precision=self.precision, **self.load_options)
        return self._models[name]

    def judge(self, name: str) -> Judge:
        """The judge of this name, loaded on first use."""
        if name not in self._judges:
            self._judges[name] = load_judge(name, device=self.device)
        return self._judges[name]

    def judges(self, specs: Sequence[JudgeSpec], model: Denoiser) -> list[tuple[JudgeSpec, Judge]]:
        """The judges of a model's samples: those asked for, or else the model's own distribution, if it is known."""
        if specs:
            return [(spec, self.judge(spec.name)) for spec in specs]
        probs = source_judge(model)
        return [] if probs is None else [(JudgeSpec(probs.name), probs)]

    def checker(self, name: str | None, model: Denoiser) -> Checker | None:
        """The checker of a model's samples: the one of this name, or else the model's own, if it names one."""
        name = name or model.checker
        if name is not None and name not in self._checkers:
            self._checkers[name] = find_checker(name)
        return None if name is None else self._checkers[name]


def provenance(model: Denoiser) -> dict[str, Any]:
    """Where a result was computed. It is the same for every run on one machine."""
    from limpet import __version__

    gpu = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if gpu else f"{model.device.type} {platform.machine()}",
        "precision": model.precision,
        "limpet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
