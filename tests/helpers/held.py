"""The most bytes of tensors that are alive at once."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors created inside that are still alive, after every operation.

    Triton's interpreter leaves the arguments of its kernels in reference cycles. So that they do not count, `collect`
    collects garbage before every operation."""

    def __init__(self, collect: bool = False) -> None:
        super().__init__()
        self.collect = collect
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __enter__(self) -> Held:
        if self.collect:
            gc.collect()
            gc.freeze()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if self.collect:
            gc.unfreeze()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.collect:
            gc.collect()
        leaves = tree_leaves((args, kwargs))
        inputs = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
        inputs |= {leaf._cdata for leaf in leaves if isinstance(leaf, UntypedStorage)}
        output = function(*args, **(kwargs or {}))
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs:
                storage = leaf.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return output
