"""Compares the predicted with the real rate of purchases that become known about a day late.

    python benchmarks/late_labels.py [--days 42] [--a-day 20000] [--horizon 5] [--model linear] [--optimizer CAdam]
        [--lr 0.03] [--ways joined,horizon] [--seeds 3] [--without-confidence inputs.bias,inputs.linear.weight]
        [--first-bias -3.2] [--run-defaults]

A simulated stream has items whose appeal drifts, a daily and a weekly cycle of traffic, and 4% purchases. Labels
contain purchases only. Each arrives after an exponential delay with a mean of one day; an event without a label counts
as negative after the horizon. The ways to learn are compared on the same events:

- joined: labels are known with their events, and each event is learned after the horizon. It is what late labels can
  reach at best.
- horizon: purchases arrive late, and each event is learned once, after the horizon (the default).
- early: `early_positives`, each event is learned as a negative at once, and purchases again when they arrive.
- arrival: purchases are learned when they arrive and other events after the horizon, each once, without weights.

For each day of the stream: the sum of the predicted probabilities over the number of purchases, and the AUC. Days up to
three days after the first event was learned are warm-up. `--lr auto` tunes the learning rate, from 0.003 on. Two
remedies for predictions that are too low can be tried: parameters without confidence, and a first value of the bias.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cadam.online import Events, LabelOptions, Labels, Learner, Schema, models
from cadam.online.data.events import Array, Batch
from cadam.online.labels.batch_growth import BatchGrowth
from cadam.online.labels.join import LabelJoin, Outcome, Resolved
from cadam.online.metrics.auc import auc
from cadam.online.models.model_file import LOG_LOSS, OptimizerSpec

DAY = 86_400.0
ITEMS, USERS = 500, 200
WAYS = ("joined", "horizon", "early", "arrival")
WARM_UP_DAYS = 3
MEMORY_DAYS = 30
"""The number of days after which the appeal of an item has a correlation of 1/e with its present appeal."""
SCHEMA = Schema({"item": f"category:{ITEMS}", "user": f"category:{USERS}"}, label="bought", id="event", time="at")


@dataclass(frozen=True)
class Purchases:
    """A simulated stream of purchases, in order of time."""

    time: Array
    item: Array
    user: Array
    bought: Array
    arrival: Array
    """The time at which each purchase becomes known; infinite for events without a purchase."""

    @classmethod
    def simulate(cls, days: int, a_day: int, seed: int) -> Purchases:
        """Simulate drifting items, cycles of traffic, a daily cycle of the rate, and delays with a mean of one day."""
        random = np.random.default_rng(seed)
        moments = random.uniform(0, days, 5 * days * a_day)
        density = (1 + 0.8 * np.sin(2 * np.pi * moments)) * (1 + 0.7 * np.sin(2 * np.pi * moments / 7))
        time = np.sort(moments[random.uniform(0, 3.06, len(moments)) < density][: days * a_day]) * DAY
        item = (ITEMS * random.beta(1, 3, len(time))).astype(np.int64)
        user = random.integers(0, USERS, len(time))
        appeal = random.normal(0, 0.8, (days + 1, ITEMS))
        memory = math.exp(-1 / MEMORY_DAYS)
        for n in range(days):  # a stationary autoregression
            appeal[n + 1] = memory * appeal[n] + math.sqrt(1 - memory**2) * appeal[n + 1]
        day, share = (time // DAY).astype(int), time % DAY / DAY
        logit = (1 - share) * appeal[day, item] + share * appeal[day + 1, item]
        logit += random.normal(0, 0.5, USERS)[user] + 0.3 * np.sin(2 * np.pi * share)
        low, high = -10.0, 5.0
        for _ in range(60):  # the intercept with which 4% of the events are purchases
            middle = (low + high) / 2
            low, high = (middle, high) if (1 / (1 + np.exp(-logit - middle))).mean() < 0.04 else (low, middle)
        bought = random.uniform(size=len(time)) < 1 / (1 + np.exp(-logit - low))
        arrival = np.where(bought, time + random.exponential(DAY, len(time)), math.inf)
        return cls(time, item, user, bought.astype(np.float32), arrival)

    def batches(self, size: int, *, is_late: bool) -> Iterator[Batch]:
        """Yield events with their labels, or events and the purchases that have become known since the last batch."""
        order = np.argsort(self.arrival, kind="stable")
        due = 0
        for first in range(0, len(self.time), size):
            rows = slice(first, first + size)
            features = {"item": self.item[rows], "user": self.user[rows]}
            ids = np.arange(first, first + len(self.time[rows]))
            events = Events(features, None if is_late else self.bought[rows], ids, None, self.time[rows])
            labels = None
            if is_late:
                end = int(np.searchsorted(self.arrival[order], self.time[rows][-1], side="right"))
                labels = Labels(order[due:end], np.ones(end - due))
                due = end
            yield Batch(events, labels)


class LearnOnArrival(LabelJoin):
    """The join of earlier versions: a label is learned when it arrives, and a missing label after the horizon."""

    def __init__(self, options: LabelOptions) -> None:
        super().__init__(options)
        self.waits_for_horizon = self.pending.keeps_labeled = False

    def _resolve_expired(self, columns: dict[str, Array] | None) -> Iterator[Resolved]:
        if columns is not None:
            columns["label"] = np.zeros(len(columns["id"]), dtype=np.float32)
            yield Resolved(columns, np.full(len(columns["id"]), Outcome.ASSUMED_NEGATIVE, dtype=np.int8))


@dataclass
class Result:
    """The predictions of one way to learn, by day."""

    ratios: Array
    """Predicted divided by real purchases."""
    aucs: Array
    warm_up: int
    """The number of days before the first one that is judged."""
    judged: Array = field(init=False)

    def __post_init__(self) -> None:
        self.judged = self.ratios[self.warm_up :]

    @property
    def auc(self) -> float:
        """The mean AUC of the judged days."""
        return float(self.aucs[self.warm_up :].mean())


def run(
    way: str,
    stream: Purchases,
    horizon: float,
    optimizer: str = "CAdam",
    lr: float | str = 0.03,
    size: int = 256,
    model_name: str = "linear",
    without_confidence: Collection[str] = (),
    first_bias: float = 0.0,
    has_run_defaults: bool = False,
) -> Result:
    """Learn from a stream in one of the `WAYS`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = models.build(model_name, SCHEMA)
    torch.nn.init.constant_(model.inputs.bias, first_bias)
    options = LabelOptions(horizon * DAY, early_positives=way == "early", capacity=len(stream.time))
    is_tuned = lr == "auto"
    spec, named = OptimizerSpec.parse(optimizer), list(model.named_parameters())
    masked = [(name, parameter) for name, parameter in named if name not in without_confidence]
    groups: list[dict[str, Any]] = [{"params": masked}]
    if without_confidence:
        groups.append({"params": [pair for pair in named if pair[0] in without_confidence], "confidence": False})
    learner = Learner(
        model,
        spec.kind(groups, lr=0.003 if is_tuned else float(lr), **spec.options),
        LOG_LOSS,
        labels=options,
        batch_size=None if has_run_defaults else size,
        batch_growth=BatchGrowth() if has_run_defaults else None,
        tune_rate=is_tuned,
        initialize_bias=has_run_defaults and way != "early",
    )
    if way == "arrival":
        learner.join = LearnOnArrival(options)
    scores = np.empty(len(stream.time))
    predict = learner._predict_batch

    def recording(events: Events, known: Array | None = None):  # type: ignore[no-untyped-def]
        result = predict(events, known)
        scores[events.ids] = result[0]
        return result

    learner._predict_batch = recording  # type: ignore[method-assign, assignment]
    for batch in stream.batches(size, is_late=way != "joined"):
        learner.process(batch)
    day = (stream.time // DAY).astype(int)
    days = range(day[-1] + 1)
    chances = 1 / (1 + np.exp(-scores))
    ratios = np.array([chances[day == n].sum() / max(1, stream.bought[day == n].sum()) for n in days])
    aucs = np.array([auc(scores[day == n], stream.bought[day == n]) for n in days])
    return Result(ratios, aucs, math.ceil(horizon) + WARM_UP_DAYS)


def main() -> None:
    """Print the ratio by day of each way, and the differences of the AUC."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=42)
    parser.add_argument("--a-day", type=int, default=20_000)
    parser.add_argument("--horizon", type=float, default=5.0, help="in days")
    parser.add_argument("--optimizer", default="CAdam")
    parser.add_argument("--model", choices=tuple(models.MODELS), default="linear")
    parser.add_argument("--lr", default="0.03", metavar="X", help="a number, or auto")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="A,B", help="always with joined")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--without-confidence", default="", metavar="A,B", help="names of parameters")
    parser.add_argument("--first-bias", type=float, default=0.0, metavar="X")
    parser.add_argument(
        "--run-defaults", action="store_true", help="growing batches and the first bias, as in `cadam run`"
    )
    options = parser.parse_args()
    excluded = [name for name in options.without_confidence.split(",") if name]
    remedies = excluded, options.first_bias, options.run_defaults
    ways = [way for way in WAYS if way in ("joined", *options.ways.split(","))]
    for seed in range(options.seeds):
        stream = Purchases.simulate(options.days, options.a_day, seed)
        results = {
            way: run(way, stream, options.horizon, options.optimizer, options.lr, 256, options.model, *remedies)
            for way in ways
        }
        print(f"\nseed {seed}: {len(stream.time):,} events, {stream.bought.mean():.2%} purchases")
        print(f"{'day':>5}" + "".join(f"{way:>10}" for way in ways) + "   predicted / real purchases")
        for day in range(options.days):
            cells = "".join(f"{results[way].ratios[day]:>10.3f}" for way in ways)
            print(f"{day:>5}{cells}{'   warm-up' if day < results['joined'].warm_up else ''}")
        for way, result in results.items():
            print(
                f"{way:>8}: ratio {result.judged.min():.3f} to {result.judged.max():.3f}, AUC {result.auc:.4f}, "
                f"{result.auc - results['joined'].auc:+.4f} against joined"
            )


if __name__ == "__main__":
    main()
