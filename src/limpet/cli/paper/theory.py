"""`limpet paper theory`: the paper's propositions, evaluated exactly."""

from limpet.cli.theory import run

__all__ = ["run"]
