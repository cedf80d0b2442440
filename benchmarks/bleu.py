"""Self-BLEU-4 here and in NLTK, on one core: the same scores, and how many times as fast.

    OMP_NUM_THREADS=1 python benchmarks/bleu.py

Ids are drawn from a Zipf distribution. NLTK's time grows with the square of the number of texts, so its sets are small;
the last line is the size of one cell of the paper, 256 texts of 1024 ids, here alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

from limpet.evaluation.metrics import self_bleu


def zipf(texts: int, length: int, vocab_size: int = 50257) -> np.ndarray:
    probs = 1 / np.arange(1, vocab_size + 1)
    return np.random.default_rng(0).choice(vocab_size, size=(texts, length), p=probs / probs.sum())


def nltk_self_bleu(tokens: np.ndarray) -> np.ndarray:
    texts, method = tokens.tolist(), SmoothingFunction().method2
    return np.array(
        [sentence_bleu(texts[:i] + texts[i + 1 :], text, smoothing_function=method) for i, text in enumerate(texts)]
    )


def timed(function: Callable[[np.ndarray], Any], tokens: np.ndarray) -> tuple[float, Any]:
    start = time.perf_counter()
    value = function(tokens)
    return time.perf_counter() - start, value


if __name__ == "__main__":
    timed(self_bleu, zipf(4, 64))
    print("texts  length   NLTK s  limpet s   ratio  largest difference")
    for texts, length in ((16, 256), (32, 256), (64, 256), (64, 1024)):
        tokens = zipf(texts, length)
        ours, own = timed(self_bleu, tokens)
        theirs, reference = timed(nltk_self_bleu, tokens)
        apart = np.abs(own - reference).max()
        print(f"{texts:5}  {length:6}  {theirs:7.2f}  {ours:8.4f}  {theirs / ours:6.0f}  {apart:.1e}")
    ours, _ = timed(self_bleu, zipf(256, 1024))
    print(f"{256:5}  {1024:6}        -  {ours:8.4f}")
