"""A scoreboard: optimizers against each other on a stream, a line for each seed as it comes in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cadam.ab.results import TUNING_SEEDS

from .runner import Event

if TYPE_CHECKING:
    from rich.console import RenderableType


class Scoreboard:
    """The paired seeds so far. Seeds that serve to choose a learning rate, or A/A, are not shown."""

    def __init__(
        self,
        experiment: str,
        title: str,
        arms: Sequence[str],
        shown: Mapping[str, str],
        condition: str | None = None,
    ) -> None:
        """`shown`: metrics with their names; `condition`: the only one whose runs are shown, if there are several."""
        self.experiment, self.title, self.arms, self.shown, self.condition = experiment, title, arms, shown, condition
        self.head = ["seed"]
        for name in shown.values():
            self.head += [f"{arms[0]} {name}", *(text for arm in arms[1:] for text in (f"{arm} {name}", "difference"))]
        self.rates: dict[str, float] = {}
        self.metrics: dict[int, dict[str, Mapping[str, float]]] = {}

    def note(self, event: Event) -> tuple[str, ...] | None:
        """Take in what happened; the line of a seed if that completes it."""
        spec = event.spec
        if event.result is None or spec.experiment != self.experiment or spec.seed >= TUNING_SEEDS:
            return None
        if self.condition not in (None, spec.condition):
            return None
        # An arm's first test run is at its chosen learning rate; runs at others only look back at the choice.
        if self.rates.setdefault(spec.optimizer, spec.lr) != spec.lr:
            return None
        arms = self.metrics.setdefault(spec.seed, {})
        arms[spec.optimizer] = event.result.outcome.metrics
        return self.line(spec.seed) if len(arms) == len(self.arms) else None

    def line(self, seed: int) -> tuple[str, ...]:
        """One seed, with a gap where an arm is still running."""
        arms, texts = self.metrics[seed], [str(seed)]
        for metric in self.shown:
            first, *others = (arms[arm][metric] if arm in arms else None for arm in self.arms)
            texts.append("" if first is None else f"{first:.4f}")
            for value in others:
                texts.append("" if value is None else f"{value:.4f}")
                texts.append("" if first is None or value is None else f"{value - first:+.4f}")
        return tuple(texts)

    def text(self, line: Sequence[str]) -> str:
        """A line for where there is no live display; each column as wide as its head, which is broken after colons."""
        widths = [max(8, *map(len, _broken(name))) for name in self.head]
        specs = [_broken(text) for text in line]
        most = max(map(len, specs))
        rows = zip(*([""] * (most - len(spec)) + spec for spec in specs), strict=True)
        return "\n".join(" ".join(f"{text:>{n}}" for text, n in zip(row, widths, strict=True)) for row in rows)

    def table(self) -> RenderableType:
        """All lines, for a live display."""
        from rich.table import Table

        table = Table(*self.head, title=self.title, title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for seed in sorted(self.metrics):
            table.add_row(*self.line(seed))
        if not self.metrics:
            table.add_row("", *["..."] * (len(self.head) - 1))
        return table


def _broken(text: str) -> list[str]:
    return re.split("(?<=:)", text)
