"""Check an installed package. The wheel builds run this after installing a wheel, outside of the source tree.

    python tests/installed.py              the wheel must bring the fused CPU kernels
    python tests/installed.py foreach      the pure Python wheel: no kernels, list operations instead

Three steps must give the weights of the reference engine.
"""

from __future__ import annotations

import sys

import torch

import cadam


def weights_of(fused: bool | None = None, foreach: bool | None = None) -> tuple[torch.Tensor, str]:
    """Return the weights after three steps, and the name of the engine."""
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
    optimizer = cadam.CAdam([weights], lr=0.01, fused=fused, foreach=foreach)
    for step in range(3):
        weights.grad = torch.sin(weights.detach() * (step + 1))
        optimizer.step()
    return weights.detach(), str(optimizer.explain())


def main(engine: str = "fused") -> None:
    weights, explained = weights_of(foreach=True) if engine == "foreach" else weights_of(fused=True)
    print(f"cadam {cadam.__version__}, torch {torch.__version__}, {cadam.__file__}\n{explained}")
    torch.testing.assert_close(weights, weights_of(foreach=False)[0], rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    main(*sys.argv[1:])
