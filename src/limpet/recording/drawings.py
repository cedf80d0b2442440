"""Drawings of outputs: a molecule as an image that a page can embed."""

import base64

from limpet.errors import LimpetError, import_extra
from limpet.evaluation.checkers.molecules import EXTRA, read_molecule

PREFIX = "data:image/svg+xml;base64,"
SIZE = 260, 180  # pixels


def draw(checker: str | None, text: str) -> str | None:
    """A drawing of an output as a data URI, or None where there is none.

    checker: the name of the model's checker; the outputs of "molecules" have drawings, made by RDKit. text: the
    output. None also if it is no valid molecule, or if RDKit is not installed."""
    if checker != "molecules":
        return None
    try:
        found = read_molecule(text)
        chem, drawing = import_extra("rdkit.Chem", EXTRA), import_extra("rdkit.Chem.Draw.rdMolDraw2D", EXTRA)
    except LimpetError:  # RDKit is not installed
        return None
    if found is None:
        return None
    canvas = drawing.MolDraw2DSVG(*SIZE)
    canvas.drawOptions().clearBackground = False
    canvas.DrawMolecule(chem.MolFromSmiles(found.canonical))
    canvas.FinishDrawing()
    return PREFIX + base64.b64encode(canvas.GetDrawingText().encode()).decode()
