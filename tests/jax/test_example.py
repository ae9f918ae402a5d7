"""The example program of the JAX page runs, and its loss decreases."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_recommender.py"


def test_the_example_learns() -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "200", "--rows", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", done.stdout))
    assert last < first < 0.7
