"""The JSON output of a summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .summary import Summary


def summary_as_json(summary: Summary) -> dict[str, Any]:
    """Return a summary as plain values for JSON; numbers that are not finite become None."""
    verdicts = {
        name: {
            "verdict_kind": verdict.kind,
            "conflicting": verdict.conflicting,
            "verdict": str(verdict),
            "action": verdict.action,
        }
        for name, verdict in summary.verdicts.items()
    }
    values = {
        "recommendations": [recommendation.as_json() for recommendation in summary.recommendations],
        "verdict": summary.verdict,
        "verdicts": verdicts,
        "warnings": list(summary.warnings),
        "rows": [asdict(row) for row in summary.rows],
    }
    finite: dict[str, Any] = _finite(values)
    return finite


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
