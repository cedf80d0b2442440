"""Leases: a runner marks the units that it is computing, so that others on the same store compute other units.

A lease is a small file that only one worker can create. Its owner rewrites it every few seconds. A lease whose owner
has died on this machine, or which has not changed for a minute, is taken over. Clocks of different machines are never
compared. A lost lease costs a unit computed twice, never a wrong result."""

import threading
import time
import uuid
from collections.abc import Iterable

from limpet.errors import LimpetError
from limpet.experiments.store import Store, is_dead, runner_id

RENEWAL = 5.0  # seconds between two changes of a lease that is held
EXPIRY = 60.0  # seconds without a change after which a lease is taken over


class Leases:
    """The leases of one worker."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._worker = uuid.uuid4().hex  # one of several in a process
        self._held: set[str] = set()
        self._seen: dict[str, tuple[bytes, float]] = {}  # leases of others: content, and since when it is unchanged
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def acquire(self, keys: Iterable[str]) -> bool:
        """Take the leases of all these units, or of none if another worker has one of them."""
        taken: list[str] = []
        for key in sorted(keys):
            if not self._acquire(f"leases/{key}"):
                self.release(taken)
                return False
            taken.append(key)
        return True

    def release(self, keys: Iterable[str]) -> None:
        """Give up the leases of these units."""
        with self._lock:
            for path in (f"leases/{key}" for key in keys):
                self._held.discard(path)
                if self._is_own(path):
                    self.store.remove(path)
            if not self._held:
                self._stop.set()

    def _acquire(self, path: str) -> bool:
        if not self.store.create(path, self._content()) and not self._take_over(path):
            return False
        self._seen.pop(path, None)
        with self._lock:
            if not self._held:
                self._stop = threading.Event()
                threading.Thread(target=self._renew, args=(self._stop,), daemon=True).start()
            self._held.add(path)
        return True

    def _take_over(self, path: str) -> bool:
        """Take an expired lease. Several workers may find it expired; the one that creates the lock file takes it."""
        if not self._has_expired(path):
            return False
        lock = f"{path}.takeover"
        if not self.store.create(lock, self._content()):
            if self._has_expired(lock):
                self.store.remove(lock)
            return False
        try:
            if not self._has_expired(path):  # another worker took it before this one had the lock
                return False
            self.store.overwrite(path, self._content())
            return True
        finally:
            self.store.remove(lock)

    def _has_expired(self, path: str) -> bool:
        content = self._read(path)
        if content is None:  # given up a moment ago
            return False
        if is_dead(content.partition(b" ")[0].decode(errors="replace")):
            return True
        before, since = self._seen.get(path, (None, 0.0))
        if content != before:  # an empty one is being written
            self._seen[path] = content, since = content, time.monotonic()
        return time.monotonic() - since > EXPIRY

    def _renew(self, stop: threading.Event) -> None:
        while not stop.wait(RENEWAL):
            with self._lock:
                for path in [*self._held]:
                    if not self._is_own(path):  # another worker took it for expired
                        self._held.discard(path)
                        continue
                    try:
                        self.store.overwrite(path, self._content())
                    except LimpetError:  # a full disk: the run stops when it publishes a unit
                        return

    def _content(self) -> bytes:
        return f"{runner_id()} {self._worker} {time.monotonic_ns()}".encode()

    def _is_own(self, path: str) -> bool:
        return f" {self._worker} ".encode() in (self._read(path) or b"")

    def _read(self, path: str) -> bytes | None:
        try:
            return self.store.content(path)
        except LimpetError:  # it cannot be read now
            return b""
