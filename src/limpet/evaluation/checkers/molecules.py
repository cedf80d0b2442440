"""The checker `molecules`: is a SMILES string a molecule, a new one, and are the molecules like those of QM9?

RDKit decides."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from limpet.errors import import_extra
from limpet.evaluation.checkers.hashes import HashSet
from limpet.models.model_files import BUILTIN_FOLDER

EXTRA = "molecules"  # which has RDKit
FOLDER = BUILTIN_FOLDER / "molecules"  # of the model, whose training data decides what is new
TRAINING, HELD_OUT = "training.hashes", "held-out.json"  # files in it
HISTOGRAMS = ("atoms", "rings", "length")  # of molecules; the names of fields of `Molecule`


class Molecule(NamedTuple):
    """What RDKit reads in a SMILES string."""

    canonical: str  # the SMILES string that every way of writing this molecule shares
    atoms: int  # without hydrogen
    rings: int
    length: int  # characters of the string as it was written
    scaffold: str  # Bemis-Murcko: rings and what joins them


@lru_cache(maxsize=1 << 18)
def read_molecule(smiles: str) -> Molecule | None:
    """The molecule of a SMILES string, or None if it is none.

    Spaces after the string are ignored, because they fill the rows of the model; a space within is an error. So are
    an empty string and a string of several molecules."""
    smiles = smiles.rstrip(" ")
    if not smiles or "." in smiles or any(letter.isspace() for letter in smiles):
        return None  # RDKit would read the rest after a space as the molecule's name
    rdkit, chem = import_extra("rdkit.rdBase", EXTRA), import_extra("rdkit.Chem", EXTRA)
    scaffolds = import_extra("rdkit.Chem.Scaffolds.MurckoScaffold", EXTRA)
    with rdkit.BlockLogs():  # of what is wrong with a string
        found = chem.MolFromSmiles(smiles)
        if found is None:
            return None
        return Molecule(
            canonical=chem.MolToSmiles(found),
            atoms=found.GetNumHeavyAtoms(),
            rings=found.GetRingInfo().NumRings(),
            length=len(smiles),
            scaffold=scaffolds.MurckoScaffoldSmiles(mol=found),
        )


def histograms(molecules: Sequence[Molecule]) -> dict[str, Counter[int]]:
    """How many molecules have which number of atoms, of rings and of characters."""
    return {name: Counter(getattr(molecule, name) for molecule in molecules) for name in HISTOGRAMS}


def total_variation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Half the sum of absolute differences of two histograms, each divided by its total: from 0 (equal) to 1."""
    if not one or not other:
        return math.nan
    totals = sum(one.values()), sum(other.values())
    keys = one.keys() | other.keys()
    return sum(abs(one.get(key, 0) / totals[0] - other.get(key, 0) / totals[1]) for key in keys) / 2


class MoleculeChecker:
    """Checks SMILES strings with RDKit (the extra `molecules`), against the training data of the built-in model.

    folder: of the model, with the hashes of its training molecules and the histograms of its held-out ones."""

    def __init__(self, folder: Path = FOLDER) -> None:
        import_extra("rdkit.Chem", EXTRA)
        self.folder = folder

    @cached_property
    def training(self) -> HashSet:
        """The canonical SMILES strings of the training molecules."""
        return HashSet.load(self.folder / TRAINING)

    @cached_property
    def held_out(self) -> dict[str, dict[int, int]]:
        """Histograms of the held-out molecules."""
        stored: dict[str, Any] = json.loads((self.folder / HELD_OUT).read_text())
        return {name: {int(key): count for key, count in stored[name].items()} for name in HISTOGRAMS}

    @property
    def conventions(self) -> dict[str, str]:
        """How each value is taken."""
        rate = f"{self.training.false_positive_rate:.1e}"
        distance = "total variation (0 to 1) between valid samples and held-out molecules in the number of"
        return {
            "valid": "share of strings that RDKit reads as one molecule",
            "unique": "different molecules among the valid strings of a seed, as a share; it falls with more samples",
            "novel": "share of the different molecules that are not in the training data, by canonical SMILES "
            f"({self.training.about}; a new molecule is taken for a known one with probability {rate})",
            "v.u.n.": "valid x unique x novel: different new molecules, as a share of all samples",
            "scaffolds": "different Bemis-Murcko scaffolds, as a share of the different molecules",
            "atoms distance": f"{distance} atoms without hydrogen",
            "rings distance": f"{distance} rings",
            "length distance": f"{distance} characters",
        }

    def check(self, text: str) -> dict[str, bool]:
        """Whether a string is a molecule."""
        return {"valid": read_molecule(text) is not None}

    def check_set(self, texts: Sequence[str]) -> dict[str, float]:
        """Uniqueness, novelty, their product with validity, and distances to held-out molecules."""
        valid = [molecule for text in texts if (molecule := read_molecule(text)) is not None]
        different = {molecule.canonical: molecule for molecule in valid}
        new = [canonical for canonical in different if canonical not in self.training]
        count = len(different)
        found = {
            "unique": count / len(valid) if valid else math.nan,
            "novel": len(new) / count if count else math.nan,
            "v.u.n.": len(new) / len(texts),
            "scaffolds": len({molecule.scaffold for molecule in different.values()}) / count if count else math.nan,
        }
        counted = histograms(valid)
        distances = {f"{name} distance": total_variation(counted[name], self.held_out[name]) for name in HISTOGRAMS}
        return found | distances
