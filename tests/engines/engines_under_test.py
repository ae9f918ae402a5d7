"""The engines under test. To add one, add a line to `ENGINES`; every test with an engine parameter then runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import cadam

DENSE, ROWS = "dense", "rows"
LAYOUTS = (DENSE, ROWS)


def _always(layout: str, dtype: torch.dtype) -> bool:
    return True


def _dense_only(layout: str, dtype: torch.dtype) -> bool:
    return layout == DENSE


def _kernels(layout: str, dtype: torch.dtype) -> bool:
    """Whether the C kernels were compiled when the package was installed."""
    return cadam.CAdam([torch.zeros(1, dtype=dtype)]).explain()[0].engine == "native"


@dataclass(frozen=True)
class Engine:
    """The options that select an engine.

    Attributes:
        options: The arguments of the constructor.
        runs: The name of the engine in `explain()`, for dense gradients and for rows of a table.
        serves: Whether the engine supports a kind of gradient and a dtype on this machine.
        any_state: Whether the engine supports moments of any dtype (`state_dtype`).
    """

    options: Mapping[str, Any]
    runs: Mapping[str, str]
    serves: Callable[[str, torch.dtype], bool] = _always
    any_state: bool = True


ENGINES: dict[str, Engine] = {
    "eager": Engine({"foreach": False}, {DENSE: "eager", ROWS: "rows"}),
    "foreach": Engine({"foreach": True}, {DENSE: "foreach"}, _dense_only),
    "native": Engine({"fused": True}, {DENSE: "native", ROWS: "native-rows"}, _kernels, any_state=False),
    # Engines that keep the scalars of a step as tensors instead of numbers.
    "eager-capturable": Engine({"foreach": False, "capturable": True}, {DENSE: "eager", ROWS: "rows"}),
    "foreach-capturable": Engine({"foreach": True, "capturable": True}, {DENSE: "foreach"}, _dense_only),
}

# Engines with plain numbers: enough for tests that do not depend on where scalars are stored.
PLAIN_ENGINES = {name: engine for name, engine in ENGINES.items() if not engine.options.get("capturable")}


def served(layouts: tuple[str, ...] = LAYOUTS, dtype: torch.dtype = torch.float32, plain: bool = False) -> list[Any]:
    """The pairs (engine name, layout) that can run here."""
    engines = PLAIN_ENGINES if plain else ENGINES
    return [(name, layout) for name, e in engines.items() for layout in layouts if e.serves(layout, dtype)]
