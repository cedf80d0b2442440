"""Trajectories of samples: recorded to files, shown in the terminal, on a page and in the playground."""

from limpet.recording.page import inline
from limpet.recording.trajectory import Frame, Header, Trajectory, follow, record

__all__ = ["Frame", "Header", "Trajectory", "follow", "inline", "record"]
