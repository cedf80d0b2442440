"""What a model is trained to make small: the Duo bound, its times and noise, the distillation gap, the judge's loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.diffusion.process import FLOOR

SLOPE = -(1 - FLOOR)  # d signal / dt of the log-linear schedule
FIRST = 1e-3  # training times lie in [FIRST, 1]


def duo_nll(log_probs: Tensor, z: Tensor, x0: Tensor, signal: float | Tensor) -> Tensor:
    """The continuous-time bound on -ln p(x0), per token, at one noise level of the log-linear schedule.

    log_probs (B, L, V), noisy tokens z and clean tokens x0 (B, L), one signal or (B,) -> (B, L). With
    r = V signal / noise, the forward distribution is (1 + r [j = x0]) noise / V and the model's is
    (1 + r p_j) noise / V. Everything is a function of u_j = ln(1 + r p_j): the sum over the vocabulary is a single sum
    of u."""
    vocab_size = log_probs.shape[-1]
    signal = torch.as_tensor(signal, dtype=torch.float64, device=log_probs.device)
    signal = signal.reshape(signal.shape + (1,) * (z.dim() - signal.dim()))
    ratio = vocab_size * signal / (1 - signal)
    log_keep = torch.log1p(ratio).to(log_probs.dtype)  # ln(1 + r): the clean token's u under a distribution sure of it
    scale = (SLOPE / (vocab_size * signal)).to(log_probs.dtype)
    rate = (vocab_size / (1 - signal)).to(log_probs.dtype)
    r = ratio.to(log_probs.dtype)

    total = torch.log1p(r.unsqueeze(-1) * log_probs.exp()).sum(-1)
    u_z = torch.log1p(r * log_probs.gather(-1, z.unsqueeze(-1)).squeeze(-1).exp())
    u_x = torch.log1p(r * log_probs.gather(-1, x0.unsqueeze(-1)).squeeze(-1).exp())
    keep = torch.exp(-log_keep)
    spread = total - vocab_size * u_z
    kept = rate * (keep - torch.exp(-u_z)) + keep * (spread + (vocab_size - 1) * log_keep)
    replaced = rate * -torch.expm1(-u_z) + spread + r * (u_x - u_z) - (1 + r) * log_keep
    return scale * torch.where(z == x0, kept, replaced)


def stratified_times(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One uniform time in each of `count` equal strata of [FIRST, 1]: (count,) float64."""
    offset = torch.rand(count, dtype=torch.float64, device=device, generator=generator)
    even = (torch.arange(count, device=device) + offset) / count
    return FIRST + (1 - FIRST) * even


def add_noise(
    x0: Tensor, signal: Tensor, vocab_size: int, generator: torch.Generator | None, prompt: int = 0
) -> Tensor:
    """Replace each token with probability 1 - signal by a uniform one (perhaps itself): (B, L), (B,) -> (B, L).

    The first `prompt` tokens stay as they are."""
    replaced = torch.rand(x0.shape, device=x0.device, generator=generator) >= signal[:, None]
    uniform = torch.randint(vocab_size, x0.shape, device=x0.device, generator=generator)
    replaced[:, :prompt] = False
    return torch.where(replaced, uniform, x0)


def causal_nll(logits: Tensor, tokens: Tensor) -> Tensor:
    """-ln p of every token but the first, given those before it: (B, L, V), (B, L) -> (B, L - 1)."""
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none")


def backward_kl(log_student: Tensor, log_teacher: Tensor) -> Tensor:
    """KL(student || teacher) per token: what the student says at t must agree with the teacher nearer the data."""
    return (log_student.exp() * (log_student - log_teacher)).sum(-1)
