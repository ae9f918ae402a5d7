"""Selection of a learning rate along a stream, from the losses that several rates have had so far.

Models at several learning rates predict the same stream. Before each batch, `RateSelector` names the rate with the
lowest discounted past loss: it follows the leader. Losses are discounted because the best rate changes: a high rate
learns the first events fastest, a lower one is better later, and drift may reverse that again. No loss of a batch
influences the choice for the same batch, so the predictions of the chosen rates are again those of a forecaster
without hindsight (Dawid 1984, "Statistical theory: the prequential approach", Journal of the Royal Statistical Society
A 147(2)). Following the leader on discounted losses is described in Cesa-Bianchi and Lugosi (2006), "Prediction,
Learning, and Games", sections 2.11 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

HALF_LIFE = 20_000
"""The default number of events after which a loss has half of its weight.

Losses of two neighboring rates differ by about 0.1 per event, at random, and by a few thousandths on average. The mean
over the last 20,000 events or so has a standard error of about 0.0004, which is enough to rank them, and a change of
the best rate is followed after about as many events.
"""
MIN_HALF_LIFE = 1_000
"""The half-life at the beginning of a stream."""
GROWTH = 0.25
"""The half-life is this share of the events so far, until it reaches its limit.

The first losses of a stream are those of untrained models. They are forgotten in proportion to the events so far.
"""


class RateSelector:
    """Names the learning rate with the lowest discounted past loss.

    It follows the leader on discounted losses, as in Cesa-Bianchi and Lugosi (2006), "Prediction, Learning, and Games",
    sections 2.11 and 4.3.

    Args:
        rates: The learning rates.
        half_life: The largest number of events after which a loss has half of its weight. It is smaller at the
            beginning: a quarter of the events so far, but at least `MIN_HALF_LIFE`.

    Raises:
        ValueError: If there is no rate, or if `half_life` is not positive.

    Example:
        >>> selector = RateSelector([0.001, 0.01])
        >>> selector.update({0.001: 0.50, 0.01: 0.45}, count=256)
        >>> selector.leader
        0.01
    """

    def __init__(self, rates: Iterable[float], half_life: float = HALF_LIFE) -> None:
        self.half_life = half_life
        self.events = 0
        """The number of events so far."""
        self.weight = 0.0
        """The discounted number of events so far."""
        self._totals: dict[float, float] = dict.fromkeys(sorted(set(rates)), 0.0)
        """The discounted sum of the losses of each rate, in increasing order of the rates."""
        if not self._totals:
            raise ValueError("a selector needs at least one learning rate")
        if not half_life > 0:
            raise ValueError(f"half_life must be above 0, got {half_life}")

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that compete, in increasing order."""
        return tuple(self._totals)

    @property
    def leader(self) -> float:
        """The rate with the lowest discounted past loss; the lowest such rate if several are equal.

        Before the first loss, and if every rate has diverged, it is the middle of the rates.
        """
        finite = [rate for rate, total in self._totals.items() if math.isfinite(total)]
        if not finite or self.weight == 0:
            return self.rates[(len(self._totals) - 1) // 2]
        return min(finite, key=lambda rate: self._totals[rate])

    @property
    def is_leader_lowest(self) -> bool:
        """Whether the leader is the lowest rate, so that a lower one may be better."""
        return self.leader == self.rates[0]

    @property
    def is_leader_highest(self) -> bool:
        """Whether the leader is the highest rate, so that a higher one may be better."""
        return self.leader == self.rates[-1]

    def loss(self, rate: float) -> float:
        """Return the discounted mean loss of a rate; nan before the first loss."""
        return self._totals[rate] / self.weight if self.weight else math.nan

    def update(self, losses: Mapping[float, float], count: int) -> None:
        """Add the losses of the next events.

        Args:
            losses: The mean loss of these events at every rate. A rate whose loss is not finite has diverged and
                never leads again.
            count: The number of these events.

        Raises:
            ValueError: If the loss of a rate is missing.
        """
        if missing := self._totals.keys() - losses.keys():
            raise ValueError(f"the losses at these rates are missing: {sorted(missing)}")
        half_life = min(self.half_life, max(MIN_HALF_LIFE, GROWTH * self.events))
        decay = 2 ** (-count / half_life)
        for rate, total in self._totals.items():
            loss = losses[rate]
            self._totals[rate] = decay * total + count * loss if math.isfinite(loss) else math.inf
        self.weight = decay * self.weight + count
        self.events += count

    def add(self, rate: float, loss: float) -> None:
        """Let a further rate compete from now on.

        Args:
            rate: The learning rate.
            loss: Its discounted mean loss so far: `loss` of a selector that was updated with all its losses, or that
                of the rate whose weights it starts from.

        Raises:
            ValueError: If the rate already competes.
        """
        if rate in self._totals:
            raise ValueError(f"the learning rate {rate:g} already competes")
        total = self.weight * loss if self.weight else 0.0
        self._totals[rate] = total if math.isfinite(total) else math.inf
        self._totals = dict(sorted(self._totals.items()))

    def remove(self, rate: float) -> None:
        """Let a rate compete no longer.

        Raises:
            ValueError: If the rate does not compete, or is the only one.
        """
        if rate not in self._totals or len(self._totals) == 1:
            raise ValueError(f"the learning rate {rate:g} cannot be removed from {self.rates}")
        del self._totals[rate]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` continues."""
        return {"events": self.events, "weight": self.weight, "totals": dict(self._totals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned. Rates as text, as JSON has them, are read as numbers."""
        self.events, self.weight = int(state["events"]), float(state["weight"])
        self._totals = {float(rate): float(total) for rate, total in state["totals"].items()}
