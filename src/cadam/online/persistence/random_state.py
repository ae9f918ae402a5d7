"""The state of all random number generators that a model may use."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, CUDA, numpy and Python, so that a model which uses any of them is reproducible."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def get_random_state() -> dict[str, Any]:
    """Return the states of the generators of torch, CUDA, numpy and Python."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a run on the CPU reserves no memory of GPUs
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that `get_random_state` returned, perhaps on a machine with fewer or no CUDA devices."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device, device_state in zip(range(torch.cuda.device_count()), state.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(device_state, device)
