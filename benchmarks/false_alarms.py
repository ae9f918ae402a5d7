"""Estimate how often a confidence sequence excludes 0 although the true difference is 0.

The sequence is checked after every block, and every simulated stream of block differences has mean 0. With independent
normal differences, at most 5 of 100 streams ever exclude 0, however often they are checked. The last line has the
widths of the intervals of independent normal differences, in standard errors of their mean. The slow tests in
`tests/statistics` check the error rates.

    python benchmarks/false_alarms.py [--streams 4000]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping

import numpy as np

from cadam.statistics.confidence_sequence import confidence_sequence, first_exclusion
from cadam.statistics.intervals import Array

LENGTH = 1000
"""The number of blocks of a stream."""
LIMITS = (50, 300, 1000)
"""Numbers of blocks within which an exclusion of 0 is counted."""
WIDTHS = (50, 200, 1000)
"""Numbers of blocks after which the width is measured."""
CHUNK = 500
"""The number of streams that are simulated at once."""


def autoregression(random: np.random.Generator, shape: tuple[int, int], correlation: float) -> Array:
    """Return an autoregression of order one with variance 1."""
    values = random.standard_normal(shape)
    values[:, 1:] *= math.sqrt(1 - correlation**2)
    for t in range(1, shape[1]):
        values[:, t] += correlation * values[:, t - 1]
    return values


def mixture(random: np.random.Generator, shape: tuple[int, int], correlation: float) -> Array:
    """Return independent noise plus an autoregression of the same variance."""
    return random.standard_normal(shape) + autoregression(random, shape, correlation)


STREAMS: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "independent, normal": lambda random, shape: random.standard_normal(shape),
    "independent, Student's t with 3 degrees": lambda random, shape: random.standard_t(3, shape),
    "independent, exponential": lambda random, shape: random.exponential(size=shape) - 1,
    "independent, log-normal": lambda random, shape: random.lognormal(size=shape) - math.exp(0.5),
    "one block in fifty is 0.98, others -0.02": lambda random, shape: (random.random(shape) < 0.02) - 0.02,
    "equal for 30 blocks, then normal": lambda random, shape: np.where(
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


def error_rates(name: str, streams: int) -> tuple[dict[int, float], Array]:
    """Simulate one kind of stream.

    Returns:
        The share of streams that exclude 0 within each number of blocks, and the half width of each stream after each
        number of blocks, in standard errors of the mean of independent blocks.
    """
    random = np.random.default_rng(0)
    exclusions: list[Array] = []
    widths: list[Array] = []
    for first in range(0, streams, CHUNK):
        low, high = confidence_sequence(STREAMS[name](random, (min(CHUNK, streams - first), LENGTH)))
        exclusions.append(first_exclusion(low, high))
        widths.append((high - low)[:, np.array(WIDTHS) - 1] / 2 * np.sqrt(WIDTHS))
    blocks = np.concatenate(exclusions)
    rates = {limit: float(np.mean((blocks > 0) & (blocks <= limit))) for limit in LIMITS}
    return rates, np.concatenate(widths)


def main() -> None:
    """Print the error rates of all kinds of streams as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4000)
    streams = parser.parse_args().streams
    print(f"| no true difference; {streams:,} streams | " + " | ".join(f"{t:,} blocks" for t in LIMITS) + " |")
    print("| --- |" + " --- |" * len(LIMITS))
    widths: dict[str, Array] = {}
    for name in STREAMS:
        rates, widths[name] = error_rates(name, streams)
        print(f"| {name} | " + " | ".join(f"{rate:.1%}" for rate in rates.values()) + " |", flush=True)
    print("\nhalf width, independent and normal, in standard errors of the mean; median (90% quantile):")
    quantiles = np.quantile(widths["independent, normal"], [0.5, 0.9], axis=0).T
    print(", ".join(f"{m:.2f} ({q:.2f}) after {t:,} blocks" for t, (m, q) in zip(WIDTHS, quantiles, strict=True)))


if __name__ == "__main__":
    main()
