"""The training loop: one recipe in, averaged weights out; it can be stopped anywhere and taken up again.

Everything random in a step is a function of the seed and the step's number, so a checkpoint is weights and counters."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.evaluation.judges import causal
from limpet.models import duo, loading
from limpet.models.model_files import write_folder
from limpet.models.tensor_files import write_tensors
from limpet.models.tokenizers import Tokenizer
from limpet.training import gaussian, objectives
from limpet.training.data import Stream, Text
from limpet.training.heldout import Network, held_out, log_probs, shown, token_nats
from limpet.training.recipe import Recipe


class Distillation:
    """Discrete consistency distillation: rounds of growing delta, each taught by the student that began it."""

    def __init__(self, teacher: duo.Network, deltas: list[float], path: gaussian.Path) -> None:
        self.teacher, self.deltas, self.path, self.round = teacher.requires_grad_(False).eval(), deltas, path, -1

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
        seen = ((gaussian.state(rows, self.path.gamma(t), noise), self.path.signal(t)) for t in (late, late - delta))
        return tuple(tensor for pair in seen for tensor in pair)

    def loss(self, network: nn.Module, *drawn: Tensor) -> Tensor:
        z_late, signal_late, z_early, signal_early = drawn
        with torch.no_grad():
            teacher = log_probs(self.teacher, z_early, signal_early)
        return objectives.backward_kl(log_probs(network, z_late, signal_late), teacher)


def distillation_of(recipe: Recipe, device: torch.device) -> Distillation | None:
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
    return Distillation(teacher.network, distil.deltas, gaussian.path(data.vocab_size, distil.clean, distil.noisy))


def network_of(recipe: Recipe) -> Network:
    """A new network of the sizes that a recipe gives."""
    data, sizes = recipe.data, recipe.sizes
    assert sizes is not None  # a recipe has them, or distils
    common = (data.vocab_size, data.length, sizes.width, sizes.blocks, sizes.heads)
    if recipe.kind == "causal":
        return causal.Network(causal.Shape(*common, sizes.hidden), sizes.dropout)
    return duo.Network(duo.Shape(*common, sizes.cond, sizes.hidden))


def seed_of(seed: int, step: int) -> int:
    """One seed per step, far apart for neighbouring steps."""
    return ((seed * 0x9E3779B97F4A7C15) ^ ((step + 1) * 0xD1B54A32D192ED03)) & (2**63 - 1)


def batch_rows(stream: Stream, length: int, batch: int, seed: int, step: int) -> Tensor:
    """The rows of one step: epochs in a fresh order, each cutting the text at its own offset."""
    available = stream.count(length, length - 3)  # at the largest offset, so at every one
    if available < batch:
        raise LimpetError(f"{len(stream.ids)} training tokens do not fill {batch} rows of {length}: lower [run] batch")
    epoch, place = divmod(step, available // batch)
    generator = torch.Generator().manual_seed(seed_of(seed, -2 - epoch))
    offset = int(torch.randint(length - 2, (), generator=generator))
    order = torch.randperm(available, generator=generator)
    which = order[place * batch : (place + 1) * batch]
    return stream.rows(which.to(stream.ids.device), length, offset)


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


class Trainer:
    """The whole state of a run: networks, optimiser, counters; `step` moves it, `save` and `load` keep it."""

    def __init__(self, recipe: Recipe, text: Text, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        torch.manual_seed(seed_of(recipe.seed, -1))
        self.distillation = distillation_of(recipe, device)
        student = copy.deepcopy(self.distillation.teacher) if self.distillation else network_of(recipe)
        self.network: Network = student.to(device).requires_grad_(True).train()
        self.average = copy.deepcopy(self.network).requires_grad_(False).eval()
        run = recipe.run
        groups = [  # norms and biases are not pulled towards nothing
            {"params": [p for p in self.network.parameters() if p.dim() > 1], "weight_decay": run.weight_decay},
            {"params": [p for p in self.network.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        first, second = run.betas
        self.optimiser = torch.optim.AdamW(groups, lr=run.rate, betas=(first, second), fused=device.type == "cuda")
        self.train_stream = text.splits["train"].to(device)
        self.validation_stream = text.splits["validation"].to(device)
        loss = self.distillation.loss if self.distillation else token_nats
        self.loss = torch.compile(loss) if run.compile else loss
        self.steps, self.seconds = 0, 0.0

    @property
    def fraction(self) -> float:
        """How much of the run is done, by steps or by the clock."""
        run = self.recipe.run
        return min(1.0, self.steps / run.steps if run.steps else self.seconds / run.seconds)

    def autocast(self) -> torch.autocast:
        """bfloat16 where the recipe says so; parameters, norms and losses stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.run.precision == "bfloat16")

    def step(self) -> Tensor:
        """One step of the optimiser and of the average; the loss stays on the device."""
        recipe, run = self.recipe, self.recipe.run
        fraction, distillation = self.fraction, self.distillation
        rows = batch_rows(self.train_stream, recipe.data.length, run.batch, recipe.seed, self.steps)
        torch.manual_seed(seed_of(recipe.seed, self.steps))  # of the noise and of dropout
        if distillation:
            distillation.begin(fraction, self.network)
        drawn = distillation.draw(rows) if distillation else shown(self.network, rows)
        for group in self.optimiser.param_groups:
            group["lr"] = rate_at(recipe, self.steps, fraction)
        with self.autocast():
            loss: Tensor = self.loss(self.network, *drawn).mean()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), run.clip)
        self.optimiser.step()
        decay = min(run.average, (1 + self.steps) / (10 + self.steps))  # early on, forget the start fast
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.network.parameters()), 1 - decay)
        self.steps += 1
        return loss.detach()

    def validate(self) -> float:
        """Held-out nats per token of the averaged weights, on the same rows and noise every time."""
        with self.autocast():
            return held_out(self.average, self.validation_stream, self.recipe.run.validate_rows).nats

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

    def save(self, file: Path) -> None:
        """A reader finds the old checkpoint or the new one, whole."""
        counters = {"steps": self.steps, "seconds": self.seconds, "round": getattr(self.distillation, "round", -1)}
        about = {"recipe": json.dumps(asdict(self.recipe)), "counters": json.dumps(counters)}
        write_tensors(file, {name: tensor.cpu() for name, tensor in self._tensors().items()}, about)

    def load(self, file: Path) -> None:
        """Take up a checkpoint of the same recipe."""
        try:
            with safe_open(file, "pt") as opened:
                about = opened.metadata()
                stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # whatever the reader makes of a broken file
            raise LimpetError(f"{file} is not a whole checkpoint ({error}): remove it to start again") from error
        if json.loads(about["recipe"]) != asdict(self.recipe):
            raise LimpetError(f"{file} was made by another recipe: remove it, or name another output folder")
        counters = json.loads(about["counters"])
        self.steps, self.seconds = counters["steps"], counters["seconds"]
        where = self.device if self.device.type == "cuda" else torch.device("cpu")
        for p in self.network.parameters():
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            self.optimiser.state[p] = {"step": torch.tensor(float(self.steps), device=where), **moments}
        for name, tensor in self._tensors().items():
            tensor.copy_(stored[name])
        if self.distillation:
            self.distillation.round = counters["round"]


def train(
    recipe: Recipe, text: Text, folder: Path, device: torch.device, report: Callable[[Progress], None]
) -> Network:
    """Run a recipe to its end in `folder`, from its checkpoint if there is one; the averaged weights.

    The clock starts after the first step, and stands still while validating: compiling and looking are not training."""
    run = recipe.run
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.safetensors"
    trainer = Trainer(recipe, text, device)
    if checkpoint.exists():
        trainer.load(checkpoint)
    ran, before, clock = 0, trainer.seconds, 0.0
    while trainer.fraction < 1:
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
    network, tokenizer = trainer.average, Tokenizer(text.tokenizer)
    if isinstance(network, duo.Network):
        duo.Duo(network, name=folder.name, tokenizer=tokenizer).save(folder)
    else:
        config = {"model_type": "causal", **vars(network.shape)}
        write_folder(folder, config, tokenizer, {name: p.detach().cpu() for name, p in network.named_parameters()})
    checkpoint.unlink(missing_ok=True)
    return network
