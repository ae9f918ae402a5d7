"""The order in which a run sees the corpus: conditions, examples and label noise.

Every run reads its part of the corpus once, as in online learning: each loss is measured on text the model has not
seen, before the step that learns from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from cadam.statistics.intervals import Array

from .corpus import Corpus

MIXED = "mixed"
SHIFT = "domain shift"


@dataclass(frozen=True)
class Stream:
    """The examples of a run.

    Attributes:
        text: All training text, one domain after the other.
        starts: The first byte of each example, of shape (steps, batch).
        noise: The share of targets that are replaced by random bytes.
    """

    text: Array
    starts: Array
    noise: float


def noisy(share: float) -> str:
    """Return the name of the condition with label noise: mixed domains, and a share of random targets."""
    return f"label noise {share:.0%}"


def build(corpus: Corpus, condition: str, seed: int, *, context: int, batch: int, steps: int) -> Stream:
    """Return the examples of a run.

    Examples are disjoint and in random order: in one order over all domains, or within each domain under domain shift.
    If a run is shorter than the corpus, it uses the same share of each domain.

    Args:
        corpus: The corpus.
        condition: `MIXED`, `SHIFT`, or the name that `noisy` returns.
        seed: Seed of the order.
        context: Number of bytes of an example, to which one byte is added as the last target.
        batch: Number of examples of a step.
        steps: Number of steps.

    Raises:
        ValueError: If the condition is unknown, or the corpus is too short.
    """
    noise = re.fullmatch(r"label noise (\d+)%", condition)
    if condition not in (MIXED, SHIFT) and noise is None:
        raise ValueError(f"unknown condition {condition!r}; the conditions are {MIXED}, {SHIFT} and label noise N%")
    generator = np.random.default_rng(seed)
    starts, first = [], 0
    for text in corpus.train.values():
        starts.append(first + context * generator.permutation((len(text) - 1) // context))
        first += len(text)
    available, needed = sum(map(len, starts)), steps * batch
    if needed > available:
        raise ValueError(f"{steps} steps need {needed} examples, and the corpus has {available}")
    # Rounding down loses at most one example per domain; the first domains make up for it.
    counts = [int(needed * len(domain) / available) for domain in starts]
    for number in range(needed - sum(counts)):
        counts[number] += 1
    order = np.concatenate([domain[:count] for domain, count in zip(starts, counts, strict=True)])
    if condition != SHIFT:
        generator.shuffle(order)
    text = np.concatenate(list(corpus.train.values()))
    return Stream(text, order.reshape(steps, batch), float(noise[1]) / 100 if noise else 0.0)
