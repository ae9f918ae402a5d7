"""The demo's scoreboard: Adam against CAdam on the click stream, a line for each seed as it comes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .experiment import TUNING_SEEDS
from .runner import Event
from .stream import DEMO_STREAM

if TYPE_CHECKING:
    from rich.console import RenderableType

NAMES = ("fig-shift", DEMO_STREAM.name)
HEAD = ("seed", "Adam log loss", "CAdam log loss", "difference", "Adam AUC", "CAdam AUC", "difference")


class Scoreboard:
    """The paired seeds so far. Seeds that serve to choose a learning rate, or A/A, are not shown."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, Mapping[str, float]]] = {}

    def note(self, event: Event) -> tuple[str, ...] | None:
        """Take in what happened; the line of a seed if that completes it."""
        cell = event.cell
        if event.result is None or cell.experiment != DEMO_STREAM.name or cell.seed >= TUNING_SEEDS:
            return None
        arms = self.metrics.setdefault(cell.seed, {})
        arms[cell.optimizer] = event.result.outcome.metrics
        return self.line(cell.seed) if len(arms) == 2 else None

    def line(self, seed: int) -> tuple[str, ...]:
        """One seed, with a gap where an arm is still running."""
        arms, texts = self.metrics[seed], [str(seed)]
        for metric in ("log loss", "auc"):
            values = [arms[arm][metric] if arm in arms else None for arm in ("Adam", "CAdam")]
            texts += ["" if value is None else f"{value:.4f}" for value in values]
            adam, cadam = values
            texts.append("" if adam is None or cadam is None else f"{cadam - adam:+.4f}")
        return tuple(texts)

    def table(self) -> RenderableType:
        """All lines, for a live display."""
        from rich.table import Table

        table = Table(*HEAD, title="A drifting, noisy click stream: predict, then learn", title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for seed in sorted(self.metrics):
            table.add_row(*self.line(seed))
        if not self.metrics:
            table.add_row("", *["..."] * (len(HEAD) - 1))
        return table
