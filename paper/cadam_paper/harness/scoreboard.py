"""A table of paired results that grows while runs are computed, with one line per seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .results import TUNING_SEEDS, Result

if TYPE_CHECKING:
    from rich.console import RenderableType


class Scoreboard:
    """The results of paired seeds so far, without runs that choose learning rates or serve the A/A noise floor.

    Args:
        experiment: The name of the study whose results are shown.
        title: The title of the table.
        arms: The arms; the first is the baseline.
        metrics: The names of metrics, with the names to show.
        condition: The only condition whose runs are shown; None to show all.
    """

    def __init__(
        self, experiment: str, title: str, arms: Sequence[str], metrics: Mapping[str, str], condition: str | None = None
    ) -> None:
        self.experiment, self.title, self.condition = experiment, title, condition
        self.arms, self.metrics = arms, metrics
        self.head = ["seed"]
        for name in metrics.values():
            others = [text for arm in arms[1:] for text in (f"{arm} {name}", "difference")]
            self.head += [f"{arms[0]} {name}", *others]
        self._rates: dict[str, float] = {}
        self._values: dict[int, dict[str, Mapping[str, float]]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, result: Result) -> tuple[str, ...] | None:
        """Add a result.

        Returns:
            The line of its seed if this result completes it, otherwise None.
        """
        spec = result.spec
        if spec.experiment != self.experiment or spec.seed >= TUNING_SEEDS:
            return None
        if self.condition not in (None, spec.condition):
            return None
        # The first run of an arm is at its chosen learning rate. Runs at other rates only check the choice.
        if self._rates.setdefault(spec.optimizer, spec.lr) != spec.lr:
            return None
        by_arm = self._values.setdefault(spec.seed, {})
        by_arm[spec.optimizer] = result.outcome.metrics
        return self._line(spec.seed) if len(by_arm) == len(self.arms) else None

    def _line(self, seed: int) -> tuple[str, ...]:
        """Return the line of one seed, with empty texts for arms that are still running."""
        by_arm, texts = self._values[seed], [str(seed)]
        for metric in self.metrics:
            first, *others = (by_arm[arm][metric] if arm in by_arm else None for arm in self.arms)
            texts.append("" if first is None else f"{first:.4f}")
            for value in others:
                texts.append("" if value is None else f"{value:.4f}")
                texts.append("" if first is None or value is None else f"{value - first:+.4f}")
        return tuple(texts)

    def format(self, line: Sequence[str]) -> str:
        """Format a line, or the head, in columns as wide as the head; the head is broken after colons."""
        widths = [max(8, *map(len, _split(name))) for name in self.head]
        columns = [_split(text) for text in line]
        height = max(map(len, columns))
        rows = zip(*([""] * (height - len(column)) + column for column in columns), strict=True)
        return "\n".join(" ".join(f"{text:>{n}}" for text, n in zip(row, widths, strict=True)) for row in rows)

    def table(self) -> RenderableType:
        """Return all lines as a table for a live display."""
        from rich.table import Table

        table = Table(*self.head, title=self.title, title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for seed in sorted(self._values):
            table.add_row(*self._line(seed))
        if not self._values:
            table.add_row("", *["..."] * (len(self.head) - 1))
        return table


def _split(text: str) -> list[str]:
    return re.split("(?<=:)", text)
