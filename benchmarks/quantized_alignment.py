"""Compare the alignment ratio of quantized moments with float32, by the size of the gradients.

    CADAM_DATA=FOLDER python benchmarks/quantized_alignment.py [--steps 4000]

A small convolutional network learns CIFAR-10 with strong weight decay, so that units die; every 20th step each weight
is classified by its gradient. A second part has weights that are dead from the start, whose gradient is only the decay;
float64 gives the exact result there. Each storage takes a minute on one core.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import cadam
from cadam.engines import moment_state
from cadam.rules.moment_storage import BLOCK_SIZE, STORAGES
from cadam_paper.images import data

DECAY, EVERY, BATCH = 4e-3, 20, 32
CLASSES = ("zero or below the normal numbers", "below 2^-30 of its block's momentum", "the others")


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 12), (12, 24), (24, 48), (48, 96)):
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, 10))


def classes_of(grad: Tensor, momentum: Tensor) -> tuple[Tensor, ...]:
    padded = nn.functional.pad(momentum.abs(), (0, -len(momentum) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    largest = padded.amax(1).repeat_interleave(BLOCK_SIZE)[: len(momentum)]
    tiny = grad.abs() < torch.finfo(torch.float32).tiny
    low = ~tiny & (grad.abs() < largest * 2**-30)
    return tiny, low, ~(tiny | low)


def trained(storage: str, steps: int) -> None:
    images = data.load("CIFAR-10", torch.device("cpu"))
    torch.manual_seed(0)
    net, order = network(), torch.Generator().manual_seed(1)
    optimizer = cadam.CAdam(net.parameters(), lr=1e-3, weight_decay=DECAY, moments=storage)
    counts = torch.zeros(len(CLASSES), 2, dtype=torch.int64)
    for step in range(1, steps + 1):
        at = torch.randint(6000, (BATCH,), generator=order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images.train[at] / 64 - 2), images.train_labels[at].long()).backward()
        if step % EVERY == 0:
            for p in net.parameters():
                momentum = moment_state.to_float32_state(optimizer.state[p], optimizer.rule)["exp_avg"].flatten()
                grad = torch.add(p.grad, p.detach(), alpha=DECAY).flatten()
                momentum = momentum + (grad - momentum) * 0.1
                aligned = momentum * grad.sign() > 0
                for count, which in zip(counts, classes_of(grad, momentum), strict=True):
                    count += torch.stack([which.sum(), (which & aligned).sum()])
        optimizer.step()
    print(f"{storage}: {optimizer.alignment().total}")
    for name, (size, aligned) in zip(CLASSES, counts.tolist(), strict=True):
        print(
            f"  gradient {name}: share {size / counts[:, 0].sum():.4f}, aligned {aligned / max(1, size):.3f}",
            flush=True,
        )


def dead(name: str, dtype: torch.dtype, **options: Any) -> None:
    torch.manual_seed(0)
    param = nn.Parameter((torch.randn(4096) * 0.02).to(dtype))
    param.grad = torch.zeros_like(param)
    optimizer = cadam.CAdam([param], lr=3e-4, weight_decay=5e-4, **options)
    found = []
    for step in range(1, 4001):
        optimizer.step()
        if step in (250, 500, 1000, 2000, 4000):
            ratio = optimizer.alignment(reset=True).total
            size = param.detach().abs().median()
            found.append(f"step {step}: {ratio.over_all:.3f} (weights of {size:.0e})")
    print(f"  {name:9}", ", ".join(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    wanted = parser.parse_args()
    print("alignment ratio of weights that are dead from the start, up to a step from the one before")
    dead("float64", torch.float64)
    for storage in STORAGES:
        dead(storage, torch.float32, moments=storage)
    for storage in STORAGES:
        trained(storage, wanted.steps)


if __name__ == "__main__":
    main()
