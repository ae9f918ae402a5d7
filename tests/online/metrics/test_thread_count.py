"""Metrics do not depend on the number of threads of numpy's linear algebra."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import numpy as np
from cadam.online.metrics.summed import Sums
random = np.random.default_rng(0)
scores, labels, weights = random.normal(size=100_000), random.random(100_000) < 0.3, random.random(100_000)
print([value.hex() for value in vars(Sums.of(scores, labels, weights)).values()])
"""


def test_weighted_sums_are_the_same_to_the_bit_with_any_number_of_threads() -> None:
    outputs = set()
    for threads in ("1", "2"):
        counts = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        process = subprocess.run(
            [sys.executable, "-c", CODE], env={**os.environ, **counts}, capture_output=True, text=True, timeout=100
        )
        assert process.returncode == 0, process.stderr
        outputs.add(process.stdout)
    assert len(outputs) == 1
