"""How the kernels of dense blocks are best shared out on a CUDA device: `TILINGS` of cadam.lab.images.densenet_blocks.

    python benchmarks/densenet_tilings.py [--json FILE]

For each kernel and each of the four blocks of DenseNet-121, at a batch of 128, the fastest few of many tilings, beside
the time that torch takes for the products alone. Compiling them takes most of the time, and all processors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from cadam.lab.images import densenet_kernels as kernels
from cadam.lab.images.densenet_blocks import TILINGS, Image, Tiling

INNER, GROWTH, SHOWN = 128, 32, 4
BLOCKS = [(32, 160, 256), (16, 320, 512), (8, 640, 1024), (4, 768, 1024)]
"""Height of the images, the width of a layer in the middle of the block, and that of the whole block."""
SPLITS = [(32, 64, 128), (16, 32, 64), (8, 16, 32), (4, 8, 16)]
SPACE: dict[str, list[Tiling]] = {
    "plain": [Tiling(rows, width) for rows, width in product((32, 64, 128, 256), (32, 64, 128))],
    "narrow": [Tiling(rows, 32, warps) for rows, warps in product((32, 64, 128, 256), (2, 4))],
    "squeeze": [Tiling(*each) for each in product((32, 64, 128), (32, 64), (4, 8), (2, 3, 4))],
    "squeeze back": [Tiling(*each) for each in product((32, 64, 128), (32, 64, 128), (4, 8))],
    "squeeze back kernel": [Tiling(*each) for each in product((32, 64, 128), (64, 128), (4, 8), (2, 3, 4))],
}


class Block:
    """What the kernels of one block read and write, at random."""

    def __init__(self, height: int, width: int, whole: int, device: str = "cuda", batch: int = 128) -> None:
        self.image, self.width, self.whole = Image(batch, height, height), width, whole
        pixels = self.image.pixels
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def some(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        self.features, self.gradient = some(pixels, whole), some(pixels, whole)
        self.inner, self.passed, self.given = some(pixels, INNER), some(pixels, INNER), some(pixels, GROWTH)
        self.kernel = some(INNER, width)
        self.inner_kernel = some(GROWTH, 3, 3, INNER).permute(0, 3, 1, 2)
        self.vectors = torch.rand(4, whole, device=device) + 0.5
        self.parts = torch.empty(pixels // 16 + 1, 2, whole, device=device)
        self.sums = torch.empty(max(max(each) for each in SPLITS) * INNER * whole, device=device)

    def launch(self, name: str, tiling: Tiling) -> None:
        pixels, width, options = self.image.pixels, self.width, tiling.options
        tiles = -(-pixels // tiling.rows)
        if name == "plain":
            grid = tiles, -(-INNER // tiling.width)
            inner, passed, sizes = self.inner, self.passed, (pixels, INNER)
            kernels.show[grid](inner, passed, *self.vectors[:2], *sizes, **options)
            kernels.inner_sums[grid](inner, passed, *self.vectors, self.parts, *sizes, **options)
            kernels.inner_back[grid](inner, passed, *self.vectors, *self.vectors[:2], *sizes, **options)
        elif name == "narrow":
            new, grid, sizes = self.features[:, width:], (tiles, 1), (pixels, GROWTH, self.whole)
            kernels.take[grid](self.given, new, self.parts, *sizes, **options)
            back = self.gradient[:, width:]
            kernels.finish_gradient[grid](new, back, self.given, *self.vectors, *sizes, **options)
        elif name == "squeeze":
            sizes = pixels, width, self.whole
            kernels.squeeze[tiles,](
                self.features, self.inner, self.kernel, *self.vectors[:2], self.parts, *sizes, INNER=INNER,
                MEASURE=True, **options,
            )  # fmt: skip
        elif name == "squeeze back":
            sizes = pixels, width, self.whole
            kernels.squeeze_back[-(-width // tiling.width), tiles](
                self.passed, self.features, self.gradient, self.kernel, *self.vectors, self.parts, *sizes, INNER=INNER,
                **options,
            )  # fmt: skip
        else:
            each = tiling.rows * -(-pixels // (tiling.rows * tiling.split))
            sizes = pixels, width, self.whole, each
            kernels.squeeze_back_kernel[-(-width // tiling.width), tiling.split](
                self.passed, self.features, self.sums, *self.vectors[:2], *sizes, INNER=INNER, **options
            )

    def products(self) -> dict[str, Callable[[], object]]:
        """The convolutions by themselves, as torch computes them."""
        shown, given, kernel = self.image.images(self.inner), self.image.images(self.given), self.inner_kernel
        tensors = torch.randn_like(self.features[:, : self.width])

        def backward(*mask: bool) -> object:
            return torch.ops.aten.convolution_backward(
                given, shown, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*mask, False]
            )

        return {
            "3x3": lambda: F.conv2d(shown, kernel, padding=1),
            "3x3, back to input": lambda: backward(True, False),
            "3x3, back to kernel": lambda: backward(False, True),
            "1x1": lambda: tensors @ self.kernel.T,
            "1x1, back to input": lambda: self.passed @ self.kernel,
            "1x1, back to kernel": lambda: self.passed.T @ tensors,
        }


def choices(name: str, block: int) -> list[Tiling]:
    splits = SPLITS[block] if name == "squeeze back kernel" else (1,)
    return [tiling._replace(split=split) for tiling in SPACE[name] for split in splits]


def compile_some(work: Sequence[tuple[str, Tiling]]) -> None:
    """Into Triton's cache, in a process of its own. What does not fit the device is left out when it is timed."""
    block = Block(8, 640, 1024, batch=2)
    for name, tiling in work:
        try:
            block.launch(name, tiling)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name} {tuple(tiling)}: {type(error).__name__}", flush=True)


def microseconds(work: Callable[[], object], times: int = 20) -> float:
    """In a graph, the best of three."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    graph.replay()
    found = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / times)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "densenet_tilings.json")
    options = parser.parse_args()
    work = [(name, tiling) for name in SPACE for tiling in SPACE[name]]
    count = max(1, (os.cpu_count() or 1) - 1)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compile_some, args=(work[part::count],)) for part in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    torch.backends.cudnn.deterministic = True
    found: dict[str, list[tuple[float, Tiling]]] = {}
    for number, sizes in enumerate(BLOCKS):
        block = Block(*sizes)
        for name, product_ in block.products().items():
            print(f"block {number}, torch's {name}: {microseconds(product_):.1f} us", flush=True)
        for name in SPACE:
            timed = []
            for tiling in choices(name, number):
                try:
                    timed.append((microseconds(partial(block.launch, name, tiling)), tiling))
                except Exception as error:  # too large for the device
                    print(f"block {number}, {name} {tuple(tiling)}: {type(error).__name__}", flush=True)
            timed.sort()
            found[f"{name}, block {number}"] = timed
            best = "; ".join(f"{time:.1f} {tuple(tiling)}" for time, tiling in timed[:SHOWN])
            used = TILINGS[name][number]
            now = next((f"{time:.1f}" for time, tiling in timed if tiling == used), "not among them")
            print(f"block {number}, {name}: {best}; used {tuple(used)}: {now}", flush=True)
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
