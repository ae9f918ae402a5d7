"""Estimate how often `cadam ab` gives a wrong verdict about equal arms, and how often it finds a known difference.

Differences of the log loss under paired seeds are simulated, batch by batch. With equal arms the difference of each
seed has mean 0, but is not 0: it has a part that stays, a random walk (drift), a season, effects of users, and noise
with bursts, in part common to all seeds. "Head start" has a lead that fades, for which there is no reason to switch.
The verdict is looked at after every batch, and any verdict other than "inconclusive" or "equivalent" at any moment
counts as wrong.

    python benchmarks/false_alarms.py [--comparisons 400] [--processes 2]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from cadam.statistics.intervals import Array
from cadam.statistics.paired_scores import PairedScores

BATCHES, BATCH_SIZE, USERS = 1200, 256, 300
LOSS = 0.45
"""The log loss of the baseline."""
STREAMS: Mapping[str, Mapping[str, Any]] = {
    "all effects": {},
    "nothing stays": {"constant": 0},
    "much drift": {"constant": 0, "drift": 0.01},
    "strong users": {"constant": 0, "users": 0.01},
    "strong seasons": {"season": 0.006, "drift": 0.004},
    "little noise": {"constant": 0.0005, "drift": 0.004, "noise": 0.05},
    "skewed": {"constant": 0, "skew": 1},
    "head start": {"constant": 0, "head_start": 0.05},
}
"""Kinds of streams, as arguments of `simulate` that differ from the defaults."""
EFFECTS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Known differences, in percent of the log loss."""


def simulate(
    random: np.random.Generator,
    *,
    seeds: int = 5,
    batches: int = BATCHES,
    constant: float = 0.001,
    drift: float = 0.002,
    season: float = 0.002,
    users: float = 0.003,
    noise: float = 0.08,
    skew: float = 0,
    head_start: float = 0,
) -> Array:
    """Return the mean difference of each batch under each seed, for equal arms.

    Args:
        random: The generator.
        seeds: The number of seeds.
        batches: The number of batches.
        constant: The standard deviation of the part that stays.
        drift: The standard deviation of a random walk at its end, which half of the seeds have.
        season: The standard deviation of the amplitude of a season.
        users: The standard deviation of the effect of a user.
        noise: The standard deviation of the noise of one event; it is four times as large in a fifth of the time.
        skew: The standard deviation of the logarithm of the noise, which then is log-normal; 0 for normal noise.
        head_start: The difference after 20 batches of a lead that is inversely proportional to the batches so far.
    """

    def draw() -> Array:
        if not skew:
            return random.standard_normal(batches)
        values = random.lognormal(0, skew, batches)
        return (values - math.exp(skew**2 / 2)) / math.sqrt((math.exp(skew**2) - 1) * math.exp(skew**2))

    time = np.arange(batches)
    activity = random.pareto(1.5, USERS) + 0.1
    shares = random.multinomial(BATCH_SIZE, activity / activity.sum(), batches) / BATCH_SIZE
    burst = np.where(random.random(batches // 40 + 1) < 0.2, 4.0, 1.0).repeat(40)[:batches]
    noise_of_batch = burst * noise / math.sqrt(BATCH_SIZE)
    common = draw() * noise_of_batch
    differences = np.empty((seeds, batches))
    for seed in range(seeds):
        walk = random.integers(2) * np.cumsum(random.normal(0, drift / math.sqrt(batches), batches))
        period = random.choice([24, 200, batches])
        wave = random.normal(0, season) * np.sin(2 * np.pi * (time / period + random.random()))
        by_user = shares @ random.normal(0, users, USERS)
        own = 0.7 * noise_of_batch * draw() + 0.5 * random.standard_normal() * common
        differences[seed] = random.normal(0, constant) + walk + wave + by_user + own
    return differences - head_start * 20 / (time + 20)


def first_verdict(differences: Array, matters: float = 0.1) -> tuple[str, int]:
    """Return the first verdict other than "inconclusive", and the number of batches until then.

    Args:
        differences: The mean difference of each batch under each seed.
        matters: The smallest difference of practical use, in percent.
    """
    pair = PairedScores("lower", matters, 0.05, differences.shape[1])
    baseline = np.full(len(differences), LOSS)
    for number, batch in enumerate(differences.T, 1):
        pair.update(baseline + batch, baseline, BATCH_SIZE, number)
        if pair.kind != "inconclusive":
            return pair.kind, number
    return "inconclusive", differences.shape[1]


def judge_simulated(name: str, effect: float, number: int, batches: int = BATCHES) -> tuple[str, int]:
    """Return the first verdict about one simulated comparison, and the number of batches until then.

    Args:
        name: The kind of stream, one of `STREAMS`.
        effect: The true difference in favor of the arm, in percent of the log loss.
        number: The number of the comparison, which is its seed.
        batches: The number of batches.
    """
    random = np.random.default_rng([number, list(STREAMS).index(name)])
    return first_verdict(simulate(random, batches=batches, **STREAMS[name]) - effect / 100 * LOSS)


def count_wrong(name: str, comparisons: int, batches: int = BATCHES, processes: int = 1) -> int:
    """Return how many of the comparisons of equal arms get a wrong verdict, if one looks after every batch."""
    verdicts = in_processes(partial(judge_simulated, name, 0.0, batches=batches), comparisons, processes)
    return sum(kind in ("better", "worse") for kind, _ in verdicts)


def in_processes(trial: Callable[[int], tuple[str, int]], count: int, processes: int) -> list[tuple[str, int]]:
    """Return the results of trials number 0, 1, ..., computed in some processes."""
    if processes == 1:
        return [trial(number) for number in range(count)]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(trial, range(count), chunksize=4))


def upper_bound(count: int, total: int) -> float:
    """Return the upper end of the one-sided 95% interval of a share (Wilson 1927)."""
    z, share = 1.645, count / total
    center = share + z**2 / (2 * total)
    return (center + z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))) / (1 + z**2 / total)


def main() -> None:
    """Print the error rates and the power."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=400)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    count, processes = options.comparisons, options.processes
    print("| stream | wrong verdicts | upper 95% bound |\n| --- | --- | --- |")
    for name in STREAMS:
        wrong = count_wrong(name, count, processes=processes)
        print(f"| {name} | {wrong} of {count} ({wrong / count:.1%}) | {upper_bound(wrong, count):.1%} |", flush=True)
    print(
        "\n| true difference | right verdicts | wrong verdicts | events until then, median |\n| --- | --- | --- | --- |"
    )
    for effect in EFFECTS:
        trials = max(20, count // 4)
        verdicts = in_processes(partial(judge_simulated, "all effects", effect), trials, processes)
        right = [batches for kind, batches in verdicts if kind == "better"]
        wrong = sum(kind == "worse" for kind, _ in verdicts)
        events = f"{BATCH_SIZE * int(np.median(right)):,}" if right else ""
        print(f"| {effect:g}% | {len(right) / trials:.0%} | {wrong / trials:.1%} | {events} |", flush=True)


if __name__ == "__main__":
    main()
