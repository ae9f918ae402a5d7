"""Tables and sentences over many comparisons."""

from __future__ import annotations

import math
from dataclasses import replace

from cadam.statistics.comparison import Comparison, compare, noise_floor
from cadam_paper.harness.comparisons import family_row, tally
from cadam_paper.harness.verdict import ONE_SEED


def test_a_tally_counts_every_comparison() -> None:
    def against(shift: float, seeds: int, spread: float = 0.01) -> Comparison:
        adam = {seed: float(seed) for seed in range(seeds)}
        cadam = {seed: value + shift + spread * (-1) ** seed for seed, value in adam.items()}
        return compare(cadam, adam, names=("CAdam", "Adam"), better="lower")

    mixed = [against(-1, 4), against(1, 4), against(0, 4), against(math.inf, 4)]
    assert tally(mixed, "problems", "lower", "higher") == "lower in 1 of 4 problems, higher in 1, undecided in 2"
    named = dict(zip(("a", "b", "c", "d"), mixed, strict=True))
    line = family_row("CAdam against Adam", named, 1.0)
    assert line.verdict == "better 1, worse 1, equivalent 0, inconclusive 1, diverged 1"
    assert line.measured == "better in a; worse in b"
    few = [against(0, 2)]
    assert tally(few, "panels", "lower", "higher") == (
        "lower in 0 of 1 panels, higher in 0, undecided in 1 (2 seeds; --full for more)"
    )
    spread_out = {seed: 40.0 * seed for seed in range(100, 104)}
    small = [replace(each, noise=noise_floor([0.0, 1.0], list(spread_out.values()))) for each in mixed]
    assert tally(small, "problems", "lower", "higher") == (
        "lower in 1 of 4 problems, higher in 1, undecided in 2; 2 of these 2 below the noise floor"
    )
    one = against(-1, 1)
    assert tally([one], "problems", "lower", "higher") == ONE_SEED
    assert family_row("", {"a": one}, 1.0).verdict == ONE_SEED
