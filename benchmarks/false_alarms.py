"""Estimate how often `cadam ab` gives a wrong verdict about equal arms, and how often it finds a known difference.

Differences of the log loss under paired seeds are simulated, batch by batch. With equal arms the difference of each
seed has mean 0, but is not 0: it has a part that stays, a random walk (drift), a season, effects of users, and noise
with bursts, in part common to all seeds. "Head start" has a lead that fades, for which there is no reason to switch.
The verdict is looked at after every batch, and the whole stream is judged at its end. Any verdict other than
"inconclusive" or "equivalent", at any moment or at the end, counts as wrong.

With "regimes" the difference under each seed has a level that lasts for about a quarter of the stream.

Four kinds of streams show the limits of the procedure. With "rare spikes" an arm is 0.5% better in all batches but
one of fifty, in which it loses all of that again. With "bad seeds" it is 0.2% better under all seeds but one of ten.
"Regimes alone" and "spikes alone" have hardly any noise beside.

    python benchmarks/false_alarms.py [--comparisons 400] [--batches 1200] [--processes 2] [--streams skewed]
        [--no-power]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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
    "regimes": {"constant": 0, "regimes": 0.005, "noise": 0.03},
}
"""Kinds of streams, as arguments of `simulate` that differ from the defaults."""
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "rare spikes": {"constant": 0, "spikes": 0.005},
    "bad seeds": {"constant": 0, "bad_seeds": 0.002},
    "regimes alone": {"constant": 0, "drift": 0, "season": 0, "users": 0, "noise": 0.03, "regimes": 0.005},
    "spikes alone": {"constant": 0, "drift": 0, "season": 0, "users": 0, "noise": 0.005, "spikes": 0.005},
}
"""Kinds of streams on which wrong verdicts are not rare."""
REGIME = 300
"""The number of batches after which the correlation within a regime is 1/e."""
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
    regimes: float = 0,
    spikes: float = 0,
    bad_seeds: float = 0,
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
        regimes: The standard deviation of a difference under each seed that lasts for some time, an autoregression.
        spikes: A lead as a share of the log loss, which is lost again in one of fifty batches on average.
        bad_seeds: A lead as a share of the log loss, which is lost again under one of ten seeds on average.
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
        if regimes:
            differences[seed] += autoregression(random, batches, regimes)
    differences -= head_start * 20 / (time + 20)
    if spikes:
        differences -= spikes * LOSS * (1 - 50 * (random.random(batches) < 1 / 50))
    if bad_seeds:
        differences -= bad_seeds * LOSS * (1 - 10 * (random.random((seeds, 1)) < 1 / 10))
    return differences


def autoregression(random: np.random.Generator, batches: int, deviation: float) -> Array:
    """Return a stationary autoregression of the first order."""
    memory = math.exp(-1 / REGIME)
    values = random.normal(0, deviation, batches)
    for number in range(1, batches):
        values[number] = memory * values[number - 1] + math.sqrt(1 - memory**2) * values[number]
    return values


@dataclass(frozen=True)
class Verdicts:
    """The verdicts about one simulated comparison."""

    first: str
    """The first verdict other than "inconclusive" while the stream runs; "inconclusive" if there is none."""
    batches: int
    """The number of batches until then."""
    at_end: str
    """The verdict at the end of the stream, of a comparison that did not stop at the first one."""

    def includes(self, *kinds: str) -> bool:
        """Return whether the first verdict or that at the end is one of these kinds."""
        return self.first in kinds or self.at_end in kinds


def judge(differences: Array, matters: float = 0.1) -> Verdicts:
    """Return the verdicts about one comparison.

    Args:
        differences: The mean difference of each batch under each seed.
        matters: The smallest difference of practical use, in percent.
    """
    total = differences.shape[1]
    pair = PairedScores("lower", matters, 0.05, total)
    baseline = np.full(len(differences), LOSS)
    first, batches = "inconclusive", total
    for number, batch in enumerate(differences.T, 1):
        pair.update(baseline + batch, baseline, BATCH_SIZE, number)
        if first not in ("better", "worse") and pair.kind not in ("inconclusive", first):
            first, batches = pair.kind, number
    pair.finish(total)
    return Verdicts(first, batches, pair.kind)


def judge_simulated(name: str, effect: float, number: int, batches: int = BATCHES) -> Verdicts:
    """Return the verdicts about one simulated comparison.

    Args:
        name: The kind of stream, one of `STREAMS` or `LIMITS`.
        effect: The true difference in favor of the arm, in percent of the log loss.
        number: The number of the comparison, which is its seed.
        batches: The number of batches.
    """
    streams = {**STREAMS, **LIMITS}
    random = np.random.default_rng([number, list(streams).index(name)])
    return judge(simulate(random, batches=batches, **streams[name]) - effect / 100 * LOSS)


def count_wrong(name: str, comparisons: int, batches: int = BATCHES, processes: int = 1) -> int:
    """Return how many of the comparisons of equal arms get a wrong verdict after any batch or at the end."""
    verdicts = in_processes(partial(judge_simulated, name, 0.0, batches=batches), comparisons, processes)
    return sum(each.includes("better", "worse") for each in verdicts)


def in_processes(trial: Callable[[int], Verdicts], count: int, processes: int) -> list[Verdicts]:
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
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--streams", default=",".join(STREAMS), help="the kinds of streams, with commas; - for none")
    parser.add_argument("--no-power", action="store_true", help="leave out the known differences")
    options = parser.parse_args()
    count, processes = options.comparisons, options.processes
    print("| stream | wrong after any batch | wrong at the end | wrong | upper 95% bound |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.streams.split(",") if options.streams != "-" else ():
        verdicts = in_processes(partial(judge_simulated, name, 0.0, batches=options.batches), count, processes)
        running = sum(each.first in ("better", "worse") for each in verdicts)
        at_end = sum(each.at_end in ("better", "worse") for each in verdicts)
        wrong = sum(each.includes("better", "worse") for each in verdicts)
        share = f"{wrong} of {count} ({wrong / count:.1%})"
        print(f"| {name} | {running} | {at_end} | {share} | {upper_bound(wrong, count):.1%} |", flush=True)
    if options.no_power:
        return
    print("\n| true difference | right before the end | events until then, median | right at the end | wrong |")
    print("| --- | --- | --- | --- | --- |")
    for effect in EFFECTS:
        trials = max(20, count // 4)
        verdicts = in_processes(partial(judge_simulated, "all effects", effect), trials, processes)
        right = [each.batches for each in verdicts if each.first == "better"]
        at_end = sum(each.at_end == "better" for each in verdicts)
        wrong = sum(each.includes("worse") for each in verdicts)
        events = f"{BATCH_SIZE * int(np.median(right)):,}" if right else ""
        print(
            f"| {effect:g}% | {len(right) / trials:.0%} | {events} | {at_end / trials:.0%} | {wrong / trials:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
