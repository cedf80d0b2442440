"""Molecules written as SMILES strings of the QM9 kind: atoms C, N, O, F, bonds, branches and ring closures."""

from __future__ import annotations

VALENCE = {"C": 4, "N": 3, "O": 2, "F": 1}
DIGITS = "123456789"
BONDS = {"-": 1, "=": 2, "#": 3}


class _Invalid(Exception):
    """The string is no molecule."""


class _Reader:
    """A SMILES string read from left to right into atoms and bonds."""

    def __init__(self) -> None:
        self.atoms: list[str] = []
        self.bonds: dict[tuple[int, int], int] = {}
        self.current: int | None = None  # the atom that the next one is bound to
        self.order: int | None = None  # of the bond just written
        self.branches: list[int] = []
        self.rings: dict[str, tuple[int, int | None]] = {}

    def read(self, smiles: str) -> None:
        before = ""
        for character in smiles:
            if character in VALENCE:
                self._atom(character)
            elif character in BONDS and self.order is None and self.current is not None:
                self.order = BONDS[character]
            elif character in DIGITS and self.current is not None and before != "(":
                self._ring(character, self.current)
            elif character == "(" and self.current is not None and self.order is None and before != "(":
                self.branches.append(self.current)
            elif character == ")" and self.branches and self.order is None and before != "(":
                self.current = self.branches.pop()
            else:
                raise _Invalid
            before = character
        if self.current is None or self.order is not None or self.branches or self.rings:
            raise _Invalid

    def _atom(self, symbol: str) -> None:
        self.atoms.append(symbol)
        if self.current is not None:
            self._bind(self.current, len(self.atoms) - 1, self.order or 1)
        self.current, self.order = len(self.atoms) - 1, None

    def _ring(self, digit: str, atom: int) -> None:
        if digit not in self.rings:
            self.rings[digit] = atom, self.order
        else:
            start, order = self.rings.pop(digit)
            if order is not None and self.order is not None and order != self.order:
                raise _Invalid
            self._bind(start, atom, order or self.order or 1)
        self.order = None

    def _bind(self, first: int, second: int, order: int) -> None:
        if first == second or (first, second) in self.bonds:
            raise _Invalid
        self.bonds[first, second] = order


def is_well_formed(smiles: str) -> bool:
    """Whether a SMILES string can be read and no atom has more bonds than its valence.

    This covers uncharged C, N, O and F without brackets or aromatic (lower case) atoms, which is what QM9 is written
    in here. It needs no chemistry library."""
    reader = _Reader()
    try:
        reader.read(smiles)
    except _Invalid:
        return False
    used = [0] * len(reader.atoms)
    for pair, order in reader.bonds.items():
        for atom in pair:
            used[atom] += order
    return all(bonds <= VALENCE[atom] for atom, bonds in zip(reader.atoms, used, strict=True))
