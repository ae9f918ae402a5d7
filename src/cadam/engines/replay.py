"""Step replay: a step that is like the one before can be taken again with a single call.

From one step to the next, usually only the gradients, the learning rate and the step count change. An engine may
record such a step (`Engine.record_step`); the optimizer then replays it, without planning, until something else
changes. Only the CUDA engines record steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .base import Refusal

if TYPE_CHECKING:
    from .base import Work
    from .cuda.sparse_grad import RowGrad

VARIABLE = "CADAM_REPLAY"
ON, OFF = ("1", "true", "on"), ("0", "false", "off")


def is_replay_enabled() -> bool:
    """Whether the environment variable CADAM_REPLAY allows step replay, which is the default.

    Raises:
        ValueError: If the variable has an unknown value.
    """
    value = os.environ.get(VARIABLE, "").lower()
    if value not in (*ON, *OFF, ""):
        raise ValueError(f"${VARIABLE} is {os.environ[VARIABLE]!r}; it takes {', '.join(OFF)} or {', '.join(ON)}")
    return value not in OFF


class ReplayedStep(Protocol):
    """A recorded step. It can be replayed while only gradients, learning rates and step counts change."""

    def step(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Replay the step. Returns False, without any effect, if something else has changed."""
        ...

    def update_rows(self, grad: RowGrad, step: int) -> bool:
        """Replay the update of a single table with this gradient and step count. Returns False like `step`."""
        ...

    def renew(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Adopt options and step counts after a step that was planned. Returns False if a new recording is needed."""
        ...


@dataclass(frozen=True)
class TrackedContainers:
    """The dicts and lists whose entries must be the same objects for a step to be replayed, except learning rates."""

    groups: list[dict[str, Any]]
    state: Mapping[Tensor, Any]
    states: Sequence[dict[str, Any]] = ()
    """The state of each parameter that is updated."""
    absent: Sequence[Tensor] = ()
    """Parameters without a gradient."""


class ReplayController:
    """Decides when a step is recorded, and keeps the recording while it can be used.

    Attributes:
        ready: The recorded step, or None.
        reason: Why there is no recorded step.
    """

    def __init__(self) -> None:
        self.ready: ReplayedStep | None = None
        self.reason = "no step was like the one before"
        self._steps = self._attempts = 0

    def after_step(self, work: Work, containers: Callable[[], TrackedContainers]) -> None:
        """Renew the recording after a planned step, or make one if the plan has lasted for some steps.

        Recording takes longer than a step, so each failed attempt doubles the number of steps before the next one.
        """
        ready, self.ready = self.ready, None  # An interrupted recording must not be used again.
        if ready is not None:
            tracked = containers()
            if ready.renew(tracked.groups, tracked.state):
                self.ready = ready
            else:
                self.reason = "the last step was on another stream, or with other groups, options or memory"
            return
        self._steps += 1
        if work and self._steps > 1 << self._attempts:
            self._attempts += 1
            recorded = work[0][0].record_step(work, containers())
            if isinstance(recorded, Refusal):
                self.reason = recorded.reason
            else:
                self.ready = recorded
