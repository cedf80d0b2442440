"""Audits done by the laboratory, on models that need no name to be loaded by; and sources that are quick to audit."""

from __future__ import annotations

import tempfile

import torch

from limpet.experiments import Results, Shelf, Store, collect, run
from limpet.experiments.executors import local
from limpet.models.duo import Duo, Network, Shape
from limpet.models.exact import Mixture
from limpet.paper import studies
from limpet.paper.studies.audits import Preset


class Given(Shelf):
    """Models that are there already."""

    def __init__(self, *models):
        super().__init__("cpu")
        self.models = {model.name: model for model in models}

    def model(self, name):
        return self.models.get(name) or super().model(name)


def audited(module, models, settings, shards=(8200, 8210)) -> Results:
    """What an audit finds on some models; whatever goes wrong in a shard is an error here."""
    preset = Preset("told", settings, shards=shards, models=tuple(model.name for model in models))
    study, shelf = studies.study(module.__name__.rpartition(".")[2], preset), Given(*models)
    with tempfile.TemporaryDirectory() as folder:
        summary = run(study, Store(folder), local(shelf=shelf), shelf)
        assert not summary.failed, summary.failed
        return collect(study, Store(folder))


def smoke(module, *models) -> Results:
    preset = module.PRESETS["smoke"]
    return audited(module, models, preset.settings, preset.shards)


def tiny_network() -> Duo:
    torch.manual_seed(0)
    network = Network(Shape(vocab_size=11, length=24, width=16, blocks=1, heads=2, cond=8, hidden=32))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Duo(network, name="tiny-distilled")


def long_source() -> Mixture:
    """1024 tokens in 64 blocks with modes of their own: as long as the paper's texts, and quick."""
    generator = torch.Generator().manual_seed(6)
    return Mixture(torch.ones(3), torch.rand(3, 16, 4, generator=generator) ** 3 + 0.02, phrases=64)
