"""The training loop: one recipe in, averaged weights out; it can be stopped anywhere and taken up again.

Everything random in a step is a function of the seed and the step's number, so a checkpoint is weights and counters."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from limpet.errors import LimpetError
from limpet.evaluation.judges import causal
from limpet.models import duo, loading
from limpet.models.model_files import write_folder
from limpet.models.prompt_layouts import LAYOUTS, SUDOKU, Board
from limpet.models.tensor_files import write_tensors
from limpet.models.tokenizers import HuggingFaceTokenizer
from limpet.training import gaussian, objectives
from limpet.training.data import Corpus, seed_of
from limpet.training.heldout import Network, held_out, log_probs, shown, token_nats
from limpet.training.recipe import Recipe

SHORT = {"cuda": 64, "cpu": 200}  # positions of a row, up to which plain products compute attention faster


class Distillation:
    """Discrete consistency distillation: rounds of growing delta, each taught by the student that began it."""

    def __init__(self, teacher: duo.DuoNetwork, deltas: list[float], path: gaussian.Path, prompt: int = 0) -> None:
        self.teacher, self.deltas, self.path, self.round = teacher.requires_grad_(False).eval(), deltas, path, -1
        self.prompt = prompt  # leading tokens that stay clean

    def begin(self, fraction: float, network: nn.Module) -> None:
        """At the start of a round the teacher becomes the student as it stands."""
        current = min(int(fraction * len(self.deltas)), len(self.deltas) - 1)
        if current != self.round:
            self.round = current
            self.teacher.load_state_dict(network.state_dict())

    def draw(self, rows: Tensor) -> tuple[Tensor, ...]:
        delta = self.deltas[self.round]
        late = (objectives.stratified_times(len(rows), None, rows.device) + delta).clamp(max=1)
        noise = gaussian.draw(rows, self.path.vocab_size)  # one draw for both times
        drawn: list[Tensor] = []
        for t in (late, late - delta):
            z = gaussian.state(rows, self.path.gamma(t), noise)
            z[:, : self.prompt] = rows[:, : self.prompt]
            drawn += [z, self.path.signal(t)]
        return tuple(drawn)

    def loss(self, network: nn.Module, *drawn: Tensor) -> Tensor:
        z_late, signal_late, z_early, signal_early = drawn
        with torch.no_grad():
            teacher = log_probs(self.teacher, z_early, signal_early)
        return objectives.backward_kl(log_probs(network, z_late, signal_late), teacher)[:, self.prompt :]


def distillation_of(recipe: Recipe, device: torch.device, prompt: int) -> Distillation | None:
    """What a student is taught by, if the recipe makes one."""
    data, distil = recipe.data, recipe.distil
    if distil is None:
        return None
    teacher = loading.load(distil.teacher, device=device)
    if not isinstance(teacher, duo.Duo):
        raise LimpetError(f"the teacher {distil.teacher} is no Duo network, and only such are distilled here")
    if (teacher.vocab_size, teacher.length) != (data.vocab_size, data.length):
        raise LimpetError(
            f"the teacher {distil.teacher} has {teacher.vocab_size} tokens and length {teacher.length}, the data "
            f"{data.vocab_size} and {data.length}: distil on the teacher's own"
        )
    path = gaussian.path(data.vocab_size, distil.clean, distil.noisy)
    return Distillation(teacher.network, distil.deltas, path, prompt)


def network_of(recipe: Recipe) -> Network:
    """A new network of the sizes that a recipe gives."""
    data, sizes = recipe.data, recipe.sizes
    assert sizes is not None  # a recipe has them, or distils
    common = (data.vocab_size, data.length, sizes.width, sizes.blocks, sizes.heads)
    if recipe.kind == "causal":
        return causal.CausalNetwork(causal.CausalShape(*common, sizes.hidden), sizes.dropout)
    network = duo.DuoNetwork(duo.DuoShape(*common, sizes.cond, sizes.hidden, sizes.learned_positions))
    if (layout := SUDOKU.get(data.format)) and network.vocab_embed.positions is not None:
        start_with_units(network.vocab_embed.positions, layout.board)
    return network


@torch.no_grad()
def start_with_units(positions: Tensor, board: Board) -> None:
    """Let each cell's learned position begin as a sum: of its own, and of those of its row, its column and its box.

    Attention then sees at once which cells share a unit, and which clue stands where: both halves begin alike."""
    own = 0.5 * positions[1 : board.cells + 1]
    of_units = 0.5 * nn.init.kaiming_uniform_(torch.empty(3 * board.side, positions.shape[1]), a=math.sqrt(5))
    for number, unit in enumerate(board.units.values()):
        own[unit] += of_units[number]
    for first in (1, board.cells + 2):
        positions[first : first + board.cells] = own + 0.25 * positions[first : first + board.cells]


def rate_at(recipe: Recipe, step: int, fraction: float) -> float:
    """A linear rise over the warmup's steps; over the last `decay` of the run, a linear fall to nothing."""
    run = recipe.run
    return run.rate * min(1.0, (step + 1) / max(run.warmup, 1)) * min(1.0, max(0.0, 1 - fraction) / run.decay)


@dataclass(frozen=True)
class Progress:
    """What a run says of itself as it goes; `validation` where it has just been measured."""

    step: int
    fraction: float
    loss: float
    rate: float
    tokens_per_second: float
    seconds: float
    seconds_left: float
    validation: float | None = None


class CapturedUpdate:
    """An update recorded as one CUDA graph and replayed, so that a step costs one launch instead of thousands.

    The first calls run as usual, because compilers and the optimizer set themselves up in them."""

    ORDINARY = 3

    def __init__(self, update: Callable[..., Tensor]) -> None:
        self.update, self.calls = update, 0
        self.stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph = torch.cuda.CUDAGraph()
        self.inputs: tuple[Tensor, ...] = ()
        self.loss = torch.empty(0)

    def __call__(self, *drawn: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= self.ORDINARY:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.update(*drawn)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if not self.inputs:
            self.inputs = tuple(tensor.clone() for tensor in drawn)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.loss = self.update(*self.inputs)
        for place, tensor in zip(self.inputs, drawn, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return self.loss


class Trainer:
    """The whole state of a run: networks, optimiser, counters; `step` moves it, `save` and `load` keep it."""

    def __init__(self, recipe: Recipe, corpus: Corpus, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.train_split, self.validation_split = (corpus.splits[name].to(device) for name in ("train", "validation"))
        prompt = self.train_split.prompt
        torch.manual_seed(seed_of(recipe.seed, -1))
        self.distillation = distillation_of(recipe, device, prompt)
        student = copy.deepcopy(self.distillation.teacher) if self.distillation else network_of(recipe)
        self.network: Network = student.to(device).requires_grad_(True).train()
        self.average = copy.deepcopy(self.network).requires_grad_(False).eval()
        self.weights: list[Tensor] = list(self.network.parameters())
        self.averages: list[Tensor] = list(self.average.parameters())
        self.optimiser = optimiser_of(recipe, self.weights, device)
        loss = self.distillation.loss if self.distillation else partial(token_nats, prompt=prompt)
        self.loss = torch.compile(loss) if recipe.run.compile else loss
        captured = recipe.run.graph and device.type == "cuda"
        self.update: Callable[..., Tensor] = CapturedUpdate(self.update_weights) if captured else self.update_weights
        self.steps, self.seconds = 0, 0.0
        self.deadline: float | None = None  # of time.monotonic(), in the place of [run] seconds

    @property
    def fraction(self) -> float:
        """How much of the run is done, by steps or by the clock."""
        run = self.recipe.run
        if run.steps:
            return min(1.0, self.steps / run.steps)
        if self.deadline is None:
            return min(1.0, self.seconds / run.seconds)
        left = max(0.0, self.deadline - time.monotonic())
        return self.seconds / (self.seconds + left) if left else 1.0

    def autocast(self) -> torch.autocast:
        """bfloat16 where the recipe says so; parameters, norms and losses stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.run.precision == "bfloat16")

    def attention(self) -> AbstractContextManager[None]:
        """Plain products for short rows. Fused attention works on tiles of 64 or 128 positions on a GPU; on a CPU its
        gradient in bfloat16 takes two to four times as long, and in float32 it is the faster one."""
        kind = self.device.type
        is_slow = kind == "cuda" or (kind == "cpu" and self.recipe.run.precision == "bfloat16")
        is_plain = is_slow and self.recipe.data.length <= SHORT[kind]
        return sdpa_kernel(SDPBackend.MATH) if is_plain else nullcontext()

    def draw(self) -> tuple[Tensor, ...]:
        """The rows of this step and their noise, which the seed and the step's number decide."""
        recipe = self.recipe
        torch.manual_seed(seed_of(recipe.seed, self.steps))  # of rows, noise and dropout
        rows = self.train_split.batch(recipe.data.length, recipe.run.batch, recipe.seed, self.steps)
        if self.distillation:
            self.distillation.begin(self.fraction, self.network)
            return self.distillation.draw(rows)
        return shown(self.network, rows, prompt=self.train_split.prompt)

    def update_weights(self, *drawn: Tensor) -> Tensor:
        """One step of the optimiser; the loss stays on the device."""
        self.optimiser.zero_grad(set_to_none=True)
        with self.autocast(), self.attention():
            loss: Tensor = self.loss(self.network, *drawn).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.weights, self.recipe.run.clip)
        self.optimiser.step()
        return loss.detach()

    def step(self) -> Tensor:
        """One step of the optimiser and of the average; the loss stays on the device."""
        rate = rate_at(self.recipe, self.steps, self.fraction)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):  # on the device, where a recorded step reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        loss = self.update(*self.draw())
        decay = min(self.recipe.run.average, (1 + self.steps) / (10 + self.steps))  # early on, forget the start fast
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.weights, 1 - decay)
        self.steps += 1
        return loss

    def validate(self) -> float:
        """Held-out nats per token of the averaged weights, on the same rows and noise every time."""
        with self.autocast():
            return held_out(self.average, self.validation_split, self.recipe.run.validate_rows).nats

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor that the next step depends on, by role and name."""
        roles: dict[str, nn.Module] = {"network": self.network, "average": self.average}
        if self.distillation:
            roles["teacher"] = self.distillation.teacher
        tensors = {f"{role}.{key}": p for role, module in roles.items() for key, p in module.named_parameters()}
        for name, p in self.network.named_parameters():
            moments = self.optimiser.state[p]
            tensors |= {f"first.{name}": moments["exp_avg"], f"second.{name}": moments["exp_avg_sq"]}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def save(self, file: Path, is_small: bool = False) -> None:
        """A reader finds the old checkpoint or the new one, whole.

        A small one leaves out the average, which starts again from the weights, and rounds the optimiser's moments to
        bfloat16: half the size, but a run that takes it up is not the same bit for bit."""
        counters = {"steps": self.steps, "seconds": self.seconds, "round": getattr(self.distillation, "round", -1)}
        about = {"recipe": json.dumps(asdict(self.recipe)), "counters": json.dumps(counters)}
        tensors = {name: tensor.cpu() for name, tensor in self._tensors().items()}
        if is_small:
            tensors = {
                name: tensor.bfloat16() if name.startswith(("first.", "second.")) else tensor
                for name, tensor in tensors.items()
                if not name.startswith("average.")
            }
        write_tensors(file, tensors, about)

    def load(self, file: Path) -> None:
        """Take up a checkpoint of the same recipe; the end of the run may be another."""
        try:
            with safe_open(file, "pt") as opened:
                about = opened.metadata()
                stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # whatever the reader makes of a broken file
            raise LimpetError(f"{file} is not a whole checkpoint ({error}): remove it to start again") from error
        if _without_ending(json.loads(about["recipe"])) != _without_ending(asdict(self.recipe)):
            raise LimpetError(f"{file} was made by another recipe: remove it, or name another output folder")
        counters = json.loads(about["counters"])
        self.steps, self.seconds = counters["steps"], counters["seconds"]
        where = self.device if self.device.type == "cuda" else torch.device("cpu")
        for p in self.weights:
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            self.optimiser.state[p] = {"step": torch.tensor(float(self.steps), device=where), **moments}
        for name, tensor in self._tensors().items():
            tensor.copy_(stored[name] if name in stored else stored[name.replace("average.", "network.", 1)])
        if self.distillation:
            self.distillation.round = counters["round"]


def _without_ending(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe but for how long it runs, how the steps are executed, where files lie, and what checks the samples."""
    left_out = {"steps", "seconds", "compile", "graph", "validate_every", "validate_rows", "save_every"}
    run = {name: value for name, value in recipe["run"].items() if name not in left_out}
    data = {name: value for name, value in recipe["data"].items() if name not in ("files", "folder")}
    return {**recipe, "run": run, "data": data, "folder": "", "checker": ""}


def optimiser_of(recipe: Recipe, weights: list[Tensor], device: torch.device) -> torch.optim.AdamW:
    """AdamW as the recipe says; norms and biases are not pulled towards zero."""
    run, is_cuda = recipe.run, device.type == "cuda"
    groups = [
        {"params": [p for p in weights if p.dim() > 1], "weight_decay": run.weight_decay},
        {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
    ]
    first, second = run.betas
    rate = torch.tensor(run.rate, device=device) if is_cuda else run.rate
    return torch.optim.AdamW(groups, lr=rate, betas=(first, second), fused=is_cuda, capturable=is_cuda)


def train(
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    device: torch.device,
    report: Callable[[Progress], None],
    deadline: float | None = None,
    extendable: Path | None = None,
) -> Network:
    """Run a recipe to its end in `folder`, from its checkpoint if there is one.

    The clock starts after the first step, and stands still while validating: compiling and looking are not training.

    Args:
        recipe: what to train; its `seconds` or `steps` say how long
        corpus: the recipe's data
        folder: where the checkpoint and at the end the model go
        device: where to train
        report: called with the progress every 50 steps, and after every validation
        deadline: the time.monotonic() at which to end instead, everything included
        extendable: a small checkpoint to write when the learning rate begins to fall; a longer run can start from it

    Returns:
        the network with the averaged weights
    """
    run = recipe.run
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.safetensors"
    trainer = Trainer(recipe, corpus, device)
    if checkpoint.exists():
        trainer.load(checkpoint)
    trainer.deadline = deadline
    ran, before, clock, fraction = 0, trainer.seconds, 0.0, trainer.fraction
    while fraction < 1:
        if extendable is not None and fraction >= 1 - run.decay and trainer.steps:
            trainer.save(extendable, is_small=True)
            extendable = None
        loss = trainer.step()
        ran += 1
        if ran == 1:
            loss.item()  # waits for the device
            clock = time.monotonic()
        now = time.monotonic()
        trainer.seconds, clock = trainer.seconds + now - clock, now
        step, seconds, fraction = trainer.steps, trainer.seconds, trainer.fraction
        validates = step % run.validate_every == 0 or fraction == 1
        if validates or step % 50 == 0:
            value = loss.item()
            if not math.isfinite(value):
                raise LimpetError(f"the loss is {value} at step {step}: lower [run] rate")
            validation = trainer.validate() if validates else None
            rate, speed = rate_at(recipe, step, fraction), (ran - 1) / max(seconds - before, 1e-9)
            tokens, left = run.batch * recipe.data.length * speed, (1 - fraction) * seconds / max(fraction, 1e-9)
            report(Progress(step, fraction, value, rate, tokens, seconds, left, validation))
            clock = time.monotonic() if validates else clock
        if step % run.save_every == 0 and fraction < 1:
            trainer.save(checkpoint)
    write_model(recipe, trainer.average, HuggingFaceTokenizer(corpus.tokenizer), folder)
    checkpoint.unlink(missing_ok=True)
    return trainer.average


def write_model(
    recipe: Recipe,
    network: Network,
    tokenizer: HuggingFaceTokenizer,
    folder: Path,
    storage: Literal["float32", "bfloat16", "int8"] = "float32",
) -> None:
    """Write the folder of a trained network: config.json, tokenizer.json and model.safetensors.

    storage: of a Duo network's matrices, as in `Duo.save`."""
    if isinstance(network, duo.DuoNetwork):
        model = duo.Duo(network, name=folder.name, tokenizer=tokenizer)
        model.checker, model.prompt_layout = recipe.checker or None, LAYOUTS.get(recipe.data.format)
        model.save(folder, storage)
    else:
        config = {"model_type": "causal", **vars(network.shape)}
        write_folder(folder, config, tokenizer, {name: p.detach().cpu() for name, p in network.named_parameters()})
