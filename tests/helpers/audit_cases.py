"""Runs of audits on models that are already loaded, and small sources for them."""

from __future__ import annotations

import tempfile

import torch

from limpet.experiments import ModelCache, Results, Store, collect, local, run
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.exact import Mixture
from limpet.paper import studies
from limpet.paper.studies.audits import AuditPreset


class LoadedModels(ModelCache):
    """A cache that already holds some models."""

    def __init__(self, *models):
        super().__init__("cpu")
        self.loaded = {model.name: model for model in models}

    def model(self, name):
        return self.loaded.get(name) or super().model(name)


def run_audit(module, models, settings, seeds=(8200, 8210)) -> Results:
    """The results of an audit on some models; a failed unit is an error."""
    preset = AuditPreset("test", settings, seeds=seeds, models=tuple(model.name for model in models))
    study, cache = studies.study(module.__name__.rpartition(".")[2], preset), LoadedModels(*models)
    with tempfile.TemporaryDirectory() as folder:
        summary = run(study, Store(folder), local(models=cache), cache)
        assert not summary.failed, summary.failed
        return collect(study, Store(folder))


def run_smoke(module, *models) -> Results:
    """The same with the smoke preset."""
    preset = module.PRESETS["smoke"]
    return run_audit(module, models, preset.settings, preset.seeds)


def tiny_network() -> Duo:
    """A random Duo network."""
    torch.manual_seed(0)
    network = DuoNetwork(DuoShape(vocab_size=11, length=24, width=16, blocks=1, heads=2, cond=8, hidden=32))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Duo(network, name="tiny-distilled")


def long_source() -> Mixture:
    """1024 tokens in 64 blocks with modes of their own: as long as the paper's texts, and fast."""
    generator = torch.Generator().manual_seed(6)
    return Mixture(torch.ones(3), torch.rand(3, 16, 4, generator=generator) ** 3 + 0.02, phrases=64)
