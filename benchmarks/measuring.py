"""What the benchmarks share: times of single functions, and a file of results that grows."""

from __future__ import annotations

import json
import math
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()


def milliseconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The median time of a function, launches included."""
    if not ON_GPU:
        function()
        begun = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - begun)
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


class ResultFile:
    """Named results in a JSON file. Each is written as soon as it is there, and what the file has is kept."""

    def __init__(self, path: Path, seconds: float = math.inf) -> None:
        self.path, self.seconds, self.started = path, seconds, time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def save(self, name: str, value: Any) -> None:
        """Store one result and print it."""
        self.values[name] = value
        self.path.write_text(json.dumps(self.values, indent=1) + "\n")
        print(f"[{time.monotonic() - self.started:6.1f}s] {name}: {json.dumps(value)[:2000]}", flush=True)

    def measure(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Store a function's result, unless it is there, there is no time left, or the function fails."""
        if name in self.values:
            return
        if time.monotonic() - self.started > self.seconds:
            print(f"no time for {name}")
            return
        try:
            result = function(*arguments, **named)
            if result is not None:
                self.save(name, result)
        except Exception:
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
