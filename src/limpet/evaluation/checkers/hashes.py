"""A set of texts as sorted 32-bit hashes: compact, without the texts, and rarely wrong about another text."""

from __future__ import annotations

import hashlib
import json
import lzma
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

SPACE = 2**32  # how many hashes there are


class HashSet:
    """Texts by 32 bits of their SHA-256.

    A text of the set is always found. Another text is taken for one of the set with probability `false_positive_rate`.
    `about` says what the texts are."""

    def __init__(self, hashes: np.ndarray, about: str = "") -> None:
        self.hashes = np.unique(hashes.astype(np.uint32))
        self.about = about

    @classmethod
    def of(cls, texts: Iterable[str], about: str = "") -> HashSet:
        """The set of some texts."""
        return cls(np.fromiter(map(_hash, texts), dtype=np.uint32), about)

    @property
    def false_positive_rate(self) -> float:
        """The probability that a text which is not in the set is taken for one that is."""
        return len(self.hashes) / SPACE

    def __len__(self) -> int:
        return len(self.hashes)

    def __contains__(self, text: str) -> bool:
        value = _hash(text)
        place = int(np.searchsorted(self.hashes, np.uint32(value)))
        return place < len(self.hashes) and int(self.hashes[place]) == value

    def save(self, path: Path) -> None:
        """Write the differences between neighbouring hashes, one plane of bytes after the other, compressed."""
        differences = np.diff(self.hashes, prepend=np.uint32(0)).astype("<u4")
        planes = differences.view(np.uint8).reshape(-1, 4).T.tobytes()
        about = json.dumps({"about": self.about, "count": len(self.hashes)}).encode()
        packed = lzma.compress(planes, preset=9 | lzma.PRESET_EXTREME)
        path.write_bytes(struct.pack("<I", len(about)) + about + packed)

    @classmethod
    def load(cls, path: Path) -> HashSet:
        """Read what `save` wrote."""
        content = path.read_bytes()
        (size,) = struct.unpack_from("<I", content)
        planes = np.frombuffer(lzma.decompress(content[4 + size :]), dtype=np.uint8)
        differences = np.ascontiguousarray(planes.reshape(4, -1).T).view("<u4").ravel()
        return cls(np.cumsum(differences, dtype=np.uint32), json.loads(content[4 : 4 + size])["about"])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
