"""When a learner's state is saved, and whether the disk took it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkpoints import Checkpoints

logger = logging.getLogger("cadam.online")


class Saving:
    """Every so many events, and after so many seconds if anything came since.

    Where checkpoints fall changes nothing but how much is computed again after a crash.
    """

    def __init__(self, checkpoints: Checkpoints | None, every: int, seconds: float) -> None:
        if every < 1:
            raise ValueError(f"checkpoint_every must be at least 1, got {every}")
        self.checkpoints, self.every, self.seconds = checkpoints, every, seconds
        self.count = self.failed = 0
        self.saved = True  # whether the disk took the last one
        self.at = 0  # events at the last one
        self.when, self.unsaved = time.monotonic(), False

    def is_due(self, events: int) -> bool:
        late = time.monotonic() - self.when > self.seconds
        return events - self.at >= self.every or (late and self.unsaved)

    def save(self, events: int, state: Callable[[], Any]) -> Path | None:
        """Write a checkpoint. If the disk does not take it, say so: the one before it stays the newest."""
        if self.checkpoints is None:
            raise ValueError("this learner has no folder for checkpoints: pass checkpoint=")
        self.count += 1
        self.at, self.when, self.unsaved = events, time.monotonic(), False
        try:
            path = self.checkpoints.save(self.count, state())
            self.saved = True
            return path
        except OSError as error:
            self.failed, self.saved = self.failed + 1, False
            logger.error("no checkpoint at %d events, learning goes on without: %s", events, error)
            return None


# Random state ----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Of all that a model may draw from."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
