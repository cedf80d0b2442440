"""The progress of a training run as TensorBoard's scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from limpet.errors import import_extra

if TYPE_CHECKING:
    from limpet.training.loop import Progress

SCALARS = ("loss", "validation", "rate", "tokens_per_second")


@contextmanager
def scalars(folder: Path | None) -> Iterator[Callable[[Progress], None]]:
    """A function that writes a run's progress to an event file in a folder; None writes nothing."""
    if folder is None:
        yield lambda now: None
        return
    import_extra("tensorboard", "tensorboard")
    with import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder)) as writer:

        def write(now: Progress) -> None:
            for name in SCALARS:
                value = getattr(now, name)
                if value is not None:
                    writer.add_scalar(f"train/{name}", value, now.step)

        yield write
