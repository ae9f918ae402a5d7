"""Time a step of `cadam.jax.cadam` beside optax.adam, jitted with donated buffers, on 50M float32 parameters.

A step is `update` and `apply_updates`. All contenders run in turn, round after round; the ratio is the median over
rounds of a contender's time to that of optax.adam in the same round, so what slows a whole round down counts for all.

    python benchmarks/jax_cpu.py [--rounds 30] [--parameters 50000000]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from typing import Any

import jax
import optax

import cadam.jax

CONTENDERS = {
    "optax.adam": optax.adam(1e-3),
    "cadam.jax.cadam": cadam.jax.cadam(1e-3),
    "cadam.jax.cadam, not counting": cadam.jax.cadam(1e-3, track_alignment=False),
    "cadam.jax.adam, not counting": cadam.jax.adam(1e-3, track_alignment=False),
}


class Contender:
    """An optimizer with its own parameters and state, which every step replaces."""

    def __init__(self, optimizer: optax.GradientTransformation, sizes: list[int]) -> None:
        self.params = tensors(sizes, 0)
        self.state = optimizer.init(self.params)

        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def seconds(self, grads: list[jax.Array]) -> float:
        start = time.perf_counter()
        self.params, self.state = jax.block_until_ready(self.step(self.params, self.state, grads))
        return time.perf_counter() - start


def tensors(sizes: list[int], seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    return [jax.random.normal(key, (size,)) for key, size in zip(keys, sizes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    given = parser.parse_args()
    print(f"jax {jax.__version__}, optax {optax.__version__}, {platform.machine()}, {os.cpu_count()} processors")
    for count in (1, 50, 500):
        sizes = [given.parameters // count] * count
        grads = [tensors(sizes, seed) for seed in (1, 2)]
        contenders = {name: Contender(optimizer, sizes) for name, optimizer in CONTENDERS.items()}
        for contender in contenders.values():
            contender.seconds(grads[0])
        rounds = [
            {name: contender.seconds(grads[number % 2]) for name, contender in contenders.items()}
            for number in range(given.rounds)
        ]
        print(f"\n{count} x {sizes[0]:,}\n{'':32}  median ms   least ms   ratio")
        for name in contenders:
            times = [each[name] for each in rounds]
            ratio = statistics.median(each[name] / each["optax.adam"] for each in rounds)
            print(f"{name:32} {statistics.median(times) * 1e3:10.1f} {min(times) * 1e3:10.1f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
