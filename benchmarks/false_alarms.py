"""Estimate the false alarm rate of the confidence sequence on streams of many kinds.

Every stream of block differences has mean 0. A false alarm is a block at which the interval excludes 0; with
independent normal differences that happens in at most 5 of 100 streams, whatever the number of checks. The last lines
are widths, in standard errors of the mean of independent blocks.

    python benchmarks/false_alarms.py [--streams 4000]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping

import numpy as np

from cadam.statistics.confidence_sequence import confidence_sequence, first_alarm
from cadam.statistics.intervals import Array

LENGTH = 1000
LOOKS = (50, 300, 1000)
WIDTHS = (50, 200, 1000)
SHARE = 500
"""Streams computed at once."""


def autoregression(random: np.random.Generator, shape: tuple[int, int], related: float) -> Array:
    """Each block goes with the one before; variance 1 from the first."""
    made = random.standard_normal(shape)
    made[:, 1:] *= math.sqrt(1 - related**2)
    for t in range(1, shape[1]):
        made[:, t] += related * made[:, t - 1]
    return made


def mixture(random: np.random.Generator, shape: tuple[int, int], related: float) -> Array:
    """Independent noise and, with the same variance, a part that goes with the block before."""
    return random.standard_normal(shape) + autoregression(random, shape, related)


STREAMS: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "independent, normal": lambda random, shape: random.standard_normal(shape),
    "independent, Student's t with 3 degrees": lambda random, shape: random.standard_t(3, shape),
    "independent, exponential": lambda random, shape: random.exponential(size=shape) - 1,
    "independent, log-normal": lambda random, shape: random.lognormal(size=shape) - math.exp(0.5),
    "one block in fifty is 0.98, others -0.02": lambda random, shape: (random.random(shape) < 0.02) - 0.02,
    "alike for 30 blocks, then normal": lambda random, shape: np.where(
        np.arange(shape[1]) < 30, 1e-9, random.standard_normal(shape)
    ),
    "variance that grows 3,000 times": lambda random, shape: (
        random.standard_normal(shape) * np.exp(np.linspace(-2, 2, shape[1]))
    ),
    "autoregression, 0.5": lambda random, shape: autoregression(random, shape, 0.5),
    "autoregression, 0.8": lambda random, shape: autoregression(random, shape, 0.8),
    "autoregression, 0.95": lambda random, shape: autoregression(random, shape, 0.95),
    "half noise, half autoregression, 0.8": lambda random, shape: mixture(random, shape, 0.8),
    "half noise, half autoregression, 0.9": lambda random, shape: mixture(random, shape, 0.9),
    "half noise, half autoregression, 0.95": lambda random, shape: mixture(random, shape, 0.95),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4000)
    streams = parser.parse_args().streams
    print(f"| no true difference; {streams:,} streams | " + " | ".join(f"{t:,} blocks" for t in LOOKS) + " |")
    print("| --- |" + " --- |" * len(LOOKS))
    widths: list[Array] = []
    for name, made in STREAMS.items():
        random = np.random.default_rng(0)
        alarms: list[Array] = []
        for first in range(0, streams, SHARE):
            low, high = confidence_sequence(made(random, (min(SHARE, streams - first), LENGTH)))
            alarms.append(first_alarm(low, high))
            if name == "independent, normal":
                widths.append((high - low)[:, np.array(WIDTHS) - 1] / 2 * np.sqrt(WIDTHS))
        found = np.concatenate(alarms)
        rates = [np.mean((found > 0) & (found <= t)) for t in LOOKS]
        print(f"| {name} | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |", flush=True)
    print("\nhalf the width, independent and normal, in standard errors of the mean; median (nine in ten are below):")
    half = np.quantile(np.concatenate(widths), [0.5, 0.9], axis=0).T
    print(", ".join(f"{m:.2f} ({most:.2f}) after {t:,} blocks" for t, (m, most) in zip(WIDTHS, half, strict=True)))


if __name__ == "__main__":
    main()
