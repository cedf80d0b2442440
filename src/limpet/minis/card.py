"""The figures in the built-in models' cards, measured from the shipped files and written into them.

    python -m limpet.minis.card                    measure everything and write the cards
    python -m limpet.minis.card --n 4 --rows 64    a quick look at smaller numbers, printed and not written
    python -m limpet.minis.card --part 1/2 &       one process a core: each takes its share of the measurements, and
    python -m limpet.minis.card --part 2/2         the plain command then writes the cards
    python -m limpet.minis.card --pack local/minis store trained weights as int8 and measure what that changes

Each measurement is kept under --cache by what decides it, so that a run that was stopped goes on."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from limpet import metrics, stats
from limpet.compare import SHARDS
from limpet.denoisers import duo, files
from limpet.denoisers.tensors import STORAGES, read_tensors, unpack_rows, write_tensors
from limpet.errors import LimpetError
from limpet.judges import Judge, causal, gen_nll, load_judge
from limpet.policy import Policy
from limpet.samples import sample
from limpet.training import evaluate
from limpet.training.data import Text, open_text

HERE = Path(__file__).parent
NAMES = ("mini", "mini-distilled", "mini-judge")
SPLITS = ("validation", "test")
MASSES = (1.0, 0.9, 0.8, 0.7, 0.65)  # steps wide enough that 64 samples a shard keep their order in entropy
CALLS = {"mini": (8, 16, 32, 64), "mini-distilled": (8, 16, 32)}  # distilled for few of them
CRS = Policy(nfe=64, budget=0.5, warmup=0.33)
NATIVE = CRS.but(horizon=0)


@dataclass(frozen=True)
class Cell:
    """One row of a table: a model under a policy."""

    model: str
    label: str
    policy: Policy


SWEEP = [Cell("mini", f"top-p {p:g}" if p < 1 else "native", NATIVE.but(top_p=p)) for p in MASSES]
REVEALED = Cell("mini", "CRS", CRS)


def curve(model: str) -> list[Cell]:
    """Native and CRS over the number of calls."""
    policies = {"native": NATIVE, "CRS": CRS}
    return [Cell(model, label, policy.but(nfe=nfe)) for label, policy in policies.items() for nfe in CALLS[model]]


def cells() -> list[Cell]:
    """Every row of the tables once."""
    return list(dict.fromkeys([*SWEEP, REVEALED, *curve("mini"), *curve("mini-distilled")]))


class Cache:
    """Measurements by what decides them, one small file each; how and where each was made is kept with it."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, about: dict[str, Any], precision: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found, and its place."""
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
        file = self.folder / f"{key}.json"
        if not file.exists():
            started = time.monotonic()
            found = measure()
            what = ", ".join(f"{key} {about[key]}" for key in ("cell", "held out", "name", "seed") if key in about)
            say(f"{what}: {time.monotonic() - started:.1f} s")
            part = file.with_suffix(".part")
            made = {"about": about, "found": found, "place": f"{precision} on {self.device}"}
            part.write_text(json.dumps(made, indent=1) + "\n")
            part.replace(file)
        kept = json.loads(file.read_text())
        return {**kept["found"], "place": kept["place"]}


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Lab:
    """What the measurements need: models and judge loaded once, the corpus, how much to measure."""

    models: dict[str, duo.Duo]  # that are sampled, in the precision asked for
    exact: dict[str, duo.Duo]  # the same in float32, for likelihoods
    judge: Judge
    text: Text
    cache: Cache
    n: int
    rows: int | None
    draws: int

    def shards(self, cell: Cell) -> dict[str, np.ndarray]:
        """Each measure of a cell, one value a shard."""
        found = [self.shard(cell, seed) for seed in SHARDS]
        return {key: np.array([shard[key] for shard in found]) for key in found[0]}

    def shard(self, cell: Cell, seed: int) -> dict[str, Any]:
        model = self.models[cell.model]
        about = {"model": model.digest, "judge": self.judge.digest, "policy": cell.policy.to_dict(), "seed": seed}

        def measure() -> dict[str, Any]:
            made = sample(model, cell.policy, self.n, seed)
            return {
                **self.measures(made.tokens.tolist()),
                "nfe": made.nfe,
                "selected": float(made.selected.double().mean()),
            }

        about |= {"cell": f"{cell.model} {cell.label} {cell.policy.nfe}", "n": self.n}
        return self.cache.get(about, model.precision, measure)

    def measures(self, tokens: list[list[int]]) -> dict[str, float]:
        nll = float(gen_nll(self.judge, tokens).by_shard([0] * len(tokens))[0])
        return {
            "nll": nll,
            "perplexity": float(np.exp(nll)),
            "entropy": float(np.mean(metrics.entropy(tokens))),
            "rep-4": float(np.mean(metrics.rep(tokens, n=4))),
        }

    def real(self) -> dict[str, float]:
        """The same measures of held-out text, rows spread evenly over the validation books."""
        stream = self.text.splits["validation"]
        length = self.models["mini"].length
        count = self.n * len(SHARDS)
        which = (torch.arange(count) * stream.count(length)) // count
        about = {"cell": "held-out text", "n": count, "judge": self.judge.digest, "text": stream.digest}
        return self.cache.get(about, "float32", lambda: dict(self.measures(stream.rows(which, length).tolist())))

    def held_out(self, name: str, split: str) -> dict[str, Any]:
        """The bound of a model, or the judge's NLL, on a split."""
        network, digest = network_of(self.judge if name == "mini-judge" else self.exact[name])
        draws = 1 if name == "mini-judge" else self.draws
        text = self.text.splits[split].digest
        about = {"held out": split, "text": text, "model": digest, "name": name, "rows": self.rows, "draws": draws}
        return self.cache.get(about, "float32", lambda: likelihood(network, self.text, split, self.rows, draws))

    def everything(self) -> list[Callable[[], dict[str, Any]]]:
        """Each measurement that the cards need, to be made in any order."""
        samples = [partial(self.shard, cell, seed) for cell in cells() for seed in SHARDS]
        return [*samples, self.real, *(partial(self.held_out, name, split) for name in NAMES for split in SPLITS)]


def network_of(model: Any) -> tuple[nn.Module, str]:
    return model.network, model.digest


def likelihood(network: nn.Module, text: Text, split: str, rows: int | None, draws: int) -> dict[str, float]:
    """Nats per token on a split, whichever of the two networks it is."""
    device = next(network.parameters()).device
    stream = text.splits[split].to(device)
    batch = 256 if device.type == "cuda" else 32
    if isinstance(network, duo.Network):
        length, nats = network.shape.length, evaluate.duo_row_nats(network, network.shape.vocab_size)
        found = evaluate.held_out(nats, stream, length, length, rows, draws, batch)
    else:
        assert isinstance(network, causal.Network)
        length, nats = network.shape.length, evaluate.causal_row_nats(network)
        found = evaluate.held_out(nats, stream, length, length - 1, rows, draws, batch)
    return {**asdict(found), "perplexity": found.perplexity}


# Tables


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def where(places: Iterable[str]) -> str:
    return f"Measured in {' and in '.join(sorted(set(places)))}."


def places(lab: Lab) -> Iterator[str]:
    """Of every sample that the tables rest on."""
    return (str(place) for cell in cells() for place in lab.shards(cell)["place"])


def with_error(values: np.ndarray, digits: int) -> str:
    estimate = stats.mean_se(values)
    return f"{estimate.mean:.{digits}f} ± {estimate.se:.{digits}f}"


def sample_rows(lab: Lab, cells: list[Cell]) -> list[list[str]]:
    rows = []
    for cell in cells:
        found = lab.shards(cell)
        measured = [with_error(found[key], digits) for key, digits in (("perplexity", 1), ("entropy", 3), ("rep-4", 4))]
        rows.append([cell.label, str(cell.policy.nfe), *measured])
    return rows


def samples_block(lab: Lab) -> str:
    real = lab.real()
    last = ["held-out text", "", f"{real['perplexity']:.1f}", f"{real['entropy']:.3f}", f"{real['rep-4']:.4f}"]
    rows = [*sample_rows(lab, [*SWEEP, REVEALED]), last]
    return table(["mini", "calls", "GenPPL", "entropy", "Rep-4"], rows) + "\n\n" + where(places(lab))


def calls_block(lab: Lab) -> str:
    rows = [
        [f"{model}, {row[0]}", *row[1:]]
        for model in ("mini", "mini-distilled")
        for row in sample_rows(lab, curve(model))
    ]
    return table(["", "calls", "GenPPL", "entropy", "Rep-4"], rows) + "\n\n" + where(places(lab))


def findings(lab: Lab) -> list[tuple[str, bool]]:
    """What the built-in models are for, each as a sentence with its figures and whether it holds."""
    found = {cell: lab.shards(cell) for cell in cells()}
    at = {(cell.model, cell.label, cell.policy.nfe): values for cell, values in found.items()}
    crs = at["mini", "CRS", 64]
    out = []
    for nfe, base, most in ((64, "top-p 0.9", 0.5), (8, "native", 0.25)):
        ratio = at["mini", "CRS", nfe]["perplexity"] / at["mini", base, nfe]["perplexity"]
        sentence = f"At {nfe} calls CRS has {with_error(ratio, 3)} of the GenPPL of {base} (wanted: at most {most})."
        out.append((sentence, bool(ratio.mean() <= most)))
    nodes = [found[cell] for cell in SWEEP]
    gap = stats.matched(
        np.stack([node["entropy"] for node in nodes], 1),
        np.stack([node["nll"] for node in nodes], 1),
        crs["entropy"],
        crs["nll"],
    )
    out.append(
        (
            f"At CRS's own entropy, shard by shard, the curve through top-p {', '.join(f'{p:g}' for p in MASSES)} lies "
            f"{with_error(-gap.values, 3)} nats above it (wanted: above by more than two standard errors).",
            bool(gap.mean + 2 * gap.se < 0),
        )
    )
    few, base8 = at["mini-distilled", "native", 8], at["mini", "native", 8]
    ratio, drop = few["perplexity"] / base8["perplexity"], base8["entropy"] - few["entropy"]
    out.append(
        (
            f"At 8 calls, native, mini-distilled has {with_error(ratio, 3)} of mini's GenPPL at an entropy "
            f"{with_error(drop, 3)} lower (wanted: at most 0.75, and at most 0.2 lower).",
            bool(ratio.mean() <= 0.75 and drop.mean() <= 0.2),
        )
    )
    return out


def findings_block(lab: Lab) -> str:
    return "\n".join(
        f"- {sentence} {'It holds.' if holds else '**It does not hold.**'}" for sentence, holds in findings(lab)
    )


def held_out_block(lab: Lab, name: str) -> str:
    rows, made = [], []
    for split in SPLITS:
        found = lab.held_out(name, split)
        made.append(found["place"])
        error = f" ± {found['error']:.4f}" if found["draws"] > 1 else ""
        values = [f"{found['nats']:.4f}{error}", f"{found['perplexity']:.2f}", f"{found['bits_per_byte']:.4f}"]
        rows.append([split, *values, f"{found['rows']:.0f}"])
    what = "nats per token" if name == "mini-judge" else "bound, nats per token"
    head = ["whole held-out books", what, "perplexity", "bits per byte", "rows of 256"]
    return table(head, rows) + "\n\n" + where(made)


def training_block(name: str, recipes: Path) -> str:
    log = [json.loads(line) for line in (recipes / "logs" / f"{name}.jsonl").read_text().splitlines()]
    held = [line for line in log if line.get("validation") is not None]
    shown = [held[round(i * (len(held) - 1) / 9)] for i in range(10)] if len(held) > 10 else held
    rows = [
        [str(line["step"]), f"{line['seconds']:.0f}", f"{line['loss']:.3f}", f"{line['validation']:.4f}"]
        for line in shown
    ]
    end = held[-1]
    before = [line for line in held if line["fraction"] <= 0.9][-1]
    fall = before["validation"] - end["validation"]
    words = (
        f"{end['step']} steps in {end['seconds']:.0f} s of training on one H200, {end['tokens_per_second'] / 1e6:.2f} "
        f"million tokens a second. Over the run's last {1 - before['fraction']:.0%} the held-out figure moved by "
        f"{-fall:+.4f}; the run ended with its time."
    )
    return words + "\n\n" + table(["step", "seconds", "loss", "held out, 1024 rows or more"], rows)


def data_block(text_folder: Path) -> str:
    about = json.loads((text_folder / "data.json").read_text())
    rows = [
        [name, *(f"{facts[key]:,}" for key in ("documents", "tokens", "bytes", "copies"))]
        for name, facts in about["splits"].items()
    ]
    return table(["split", "books", "tokens", "bytes", "left out as copies"], rows)


def storage_block(recipes: Path, name: str) -> str:
    found = json.loads((recipes / "logs" / "storage.json").read_text())[name]
    return (
        f"Matrices are stored as int8 with one float32 scale a row. On {found['rows']} validation rows, with the same "
        f"times and noise, that moves the figure from {found['trained']:.4f} to {found['stored']:.4f} nats per token: "
        f"by {found['stored'] - found['trained']:+.4f}."
    )


def fill(card: str, blocks: dict[str, str]) -> str:
    """A card with the text between its markers replaced."""
    for name, content in blocks.items():
        before, begin, rest = card.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not begin or not end:
            raise LimpetError(f"a card has no place for {name!r}: put <!-- {name} --> and <!-- end --> on lines there")
        card = before + begin + content + "\n" + end + after
    return card


def blocks_of(lab: Lab, name: str, recipes: Path, text_folder: Path) -> Iterator[tuple[str, str]]:
    yield "data", data_block(text_folder)
    yield "training", training_block(name, recipes)
    yield "storage", storage_block(recipes, name)
    yield "held-out", held_out_block(lab, name)
    if name != "mini-judge":
        yield "calls", calls_block(lab)
        yield "findings", findings_block(lab)
    if name == "mini":
        yield "samples", samples_block(lab)


# Storage


def pack(trained: Path, text: Text, recipes: Path, rows: int, device: str | None) -> None:
    """Store trained folders as the built-in ones, int8 by rows, and write down what that does to held-out NLL."""
    found = {}
    for name in NAMES:
        state = read_tensors(trained / name / "model.safetensors")
        (HERE / name).mkdir(exist_ok=True)
        write_tensors(HERE / name / "model.safetensors", STORAGES["int8"](unpack_rows(state)))
        (HERE / name / "model.safetensors").chmod(0o644)
        for file in ("config.json", "tokenizer.json"):
            (HERE / name / file).write_bytes((trained / name / file).read_bytes())
        nats = []
        for folder in (trained / name, HERE / name):
            load: Callable[..., Any] = load_judge if name == "mini-judge" else files.load
            network, _ = network_of(load(str(folder), device=device))
            nats.append(likelihood(network, text, "validation", rows, 1))
        found[name] = {"trained": nats[0]["nats"], "stored": nats[1]["nats"], "rows": nats[0]["rows"]}
        say(f"{name}: {found[name]}")
    (recipes / "logs" / "storage.json").write_text(json.dumps(found, indent=2) + "\n")


def share(everything: list[Any], part: str) -> list[Any]:
    """ "2/3": the second of three shares."""
    try:
        i, n = map(int, part.split("/"))
    except ValueError:
        i, n = 0, 0
    if not 1 <= i <= n:
        raise LimpetError(f"--part is I/N with I from 1 to N, such as 1/2, not {part!r}")
    return everything[i - 1 :: n]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m limpet.minis.card", description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=64, help="samples in each of the four shards")
    parser.add_argument("--rows", type=int, help="held-out rows, spread over the books; all unless told")
    parser.add_argument("--draws", type=int, default=4, help="draws of times and noise for the bound")
    parser.add_argument("--data", type=Path, default=Path("local/minis/data"), help="the prepared corpus")
    parser.add_argument("--cache", type=Path, default=Path("local/minis/card"), help="where measurements are kept")
    parser.add_argument("--recipes", type=Path, default=Path("recipes/minis"), help="recipes and their logs")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU where there is one")
    parser.add_argument(
        "--precision", choices=tuple(duo.PRECISIONS), default="bfloat16", help="of the two models as they are sampled"
    )
    parser.add_argument("--part", metavar="I/N", help="only make the I-th of N shares of the measurements")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="store the trained models of this folder")
    given = parser.parse_args(arguments)
    try:
        text = open_text(given.data, {}, SPLITS)
        if text is None:
            raise LimpetError(
                f"no prepared corpus in {given.data}: run limpet train on a recipe once, or name it (--data)"
            )
        if given.pack is not None:
            pack(given.pack, text, given.recipes, given.rows or 256, given.device)
            return 0
        models = {name: files.load(name, device=given.device, precision=given.precision) for name in NAMES[:2]}
        judge = load_judge(device=given.device)
        gpu = models["mini"].device.type == "cuda"
        cache = Cache(given.cache, torch.cuda.get_device_name() if gpu else "a CPU")
        exact = {name: files.load(name, device=given.device) for name in NAMES[:2]}
        lab = Lab(models, exact, judge, text, cache, given.n, given.rows, given.draws)
        if given.part is not None:
            for measurement in share(lab.everything(), given.part):
                measurement()
            return 0
        whole = given.n >= 64 and given.rows is None
        for name in NAMES:
            blocks = dict(blocks_of(lab, name, given.recipes, given.data))
            if whole:
                card = HERE / name / "README.md"
                card.write_text(fill(card.read_text(), blocks))
            print(f"# {name}\n\n" + "\n\n".join(blocks.values()) + "\n")
        return 0 if all(holds for _, holds in findings(lab)) or not whole else 1
    except LimpetError as error:
        say(f"limpet: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
