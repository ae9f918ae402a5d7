"""The kernels of DenseNet's blocks against the blocks as torch computes them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from triton_interpreter import interpreted, needs_triton, on_cuda

from cadam.lab.images import densenet, models
from cadam.lab.images.data import Images
from cadam.lab.images.streams import noisy, sudden
from cadam.lab.images.train import Run, Task

AGAINST_TORCH = """
import copy, torch
from torch.nn import functional as F
from cadam.lab.images import densenet, densenet_blocks

def network(blocks, growth):
    net = densenet.DenseNet(blocks, growth, 3, 10)
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):  # some weights of a norm are negative
            torch.nn.init.normal_(part.weight)
            torch.nn.init.normal_(part.bias, 0, 0.3)
    return net

def apart(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())

def check(blocks, growth, count, size, layout, tilings, mean=0.0, steps=1):
    # As near to float64 as torch's own float32, at a given mean of the pixels.
    densenet_blocks.TILINGS = {name: [tiling] * 4 for name, tiling in tilings.items()}
    torch.manual_seed(size)
    theirs = network(blocks, growth).to(memory_format=layout)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    assert densenet.fuse(ours)
    for _ in range(steps):
        x, y = mean + torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))
        for net in (ours, theirs, exact):
            net.zero_grad()
            F.cross_entropy(net(x.to(net.classifier.weight.dtype)), y).backward()
        for (name, a), (_, b), (_, c) in zip(*(net.named_parameters() for net in (ours, theirs, exact))):
            assert layout == torch.contiguous_format or a.grad.stride() == b.grad.stride(), name
            found, allowed = apart(a.grad, c.grad), 1e-5 + 3 * apart(b.grad, c.grad)
            assert found < allowed, (name, found, allowed)
        for (name, a), (_, b), (_, c) in zip(*(net.named_buffers() for net in (ours, theirs, exact))):
            assert apart(a, c) < 1e-6 + 3 * apart(b, c), (name, apart(a, c), apart(b, c))
    for net in (ours, exact):
        for name, part in net.named_buffers():
            part.mul_(1e-4 if name.endswith("var") else 1.0)  # so that epsilon counts
    with torch.no_grad():
        assert apart(ours.eval()(x), exact.eval()(x.double())) < 1e-5

T = densenet_blocks.Tiling
whole = dict(densenet_blocks.TILINGS)
last = {name: tilings[-1] for name, tilings in whole.items()}
small = {name: T(32, 16) for name in whole} | {"squeeze back kernel": T(16, 16, split=4)}
check((2, 1), 8, 3, 8, torch.channels_last, last, steps=2)
densenet_blocks.FINISH["TILES"] = 2  # tiles are added up in several goes
check((2, 1), 8, 3, 6, torch.contiguous_format, small, mean=100.0)  # 108 pixels: the last tile is not full
check((1, 1), 16, 2, 6, torch.channels_last, small)
check((1,), 8, 1, 5, torch.channels_last, last)
"""


@needs_triton
def test_blocks_in_tritons_interpreter() -> None:
    done = interpreted(AGAINST_TORCH)
    assert done.returncode == 0, done.stderr


REFUSED = """
import torch
from cadam.lab.images import densenet
net = densenet.DenseNet((2, 1), 8, 3, 10)
assert densenet.fuse(net)

def refused(kind, text, work):
    try:
        work()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

refused(ValueError, "7x8 pixels cannot be pooled by 2x2", lambda: net(torch.zeros(2, 3, 7, 8)))
refused(ValueError, "8x7 pixels cannot be pooled by 2x2", lambda: net(torch.zeros(2, 3, 8, 7)))
refused(ValueError, "2x4 pixels cannot be pooled by 2x2", lambda: net(torch.zeros(2, 3, 4, 8)))
refused(ValueError, "4x2 pixels cannot be pooled by 4x4", lambda: net(torch.zeros(2, 3, 8, 4)))
many = torch.zeros(1, 16, 1, 1).expand(1 << 24, 16, 2, 2)  # 24 features, and 32 within a layer
refused(ValueError, "16777216 images at once are too many: 32 features", lambda: net.features[3](many))
refused(ValueError, "more than one pixel is needed", lambda: net.features[3](torch.zeros(1, 16, 1, 1)))
refused(ValueError, "more than one pixel is needed", lambda: net(torch.zeros(0, 3, 8, 8)))
net.features[1].norm.eval()
refused(ValueError, "trained or evaluated as a whole", lambda: net(torch.zeros(2, 3, 8, 8)))
net.train()
with torch.no_grad():  # a network that has left the numbers says so, as torch's does
    net.features[0].weight[0, 0, 0, 0] = float("inf")
assert net(torch.randn(2, 3, 4, 4)).isnan().all()
net.eval()
refused(RuntimeError, "evaluate it under no_grad()", lambda: net(torch.zeros(2, 3, 8, 8)))
"""


@needs_triton
def test_what_blocks_cannot_do_is_said() -> None:
    done = interpreted(REFUSED)
    assert done.returncode == 0, done.stderr


def random_images(train: int, test: int, channels: int, size: int) -> Images:
    random = np.random.default_rng(0)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.integers(256, size=(count, channels, size, size), dtype=np.uint8), random.integers(10, size=count)

    return Images.of(some(train), some(test))


def test_models_without_kernels_of_their_own_stay_as_they_are() -> None:
    assert not densenet.fuse(models.build("small VGG", 1, 10, 0))
    with pytest.raises(ValueError, match="8 channels that grows by 4 cannot be fused"):
        densenet.fuse(models.build("small DenseNet", 1, 10, 0))
    unfit = densenet.DenseNet((3, 1), 8, 3, 10)
    with pytest.raises(ValueError, match="20 channels that grows by 8 cannot be fused"):
        densenet.fuse(unfit)
    assert not any(part.fused for part in unfit.modules() if isinstance(part, densenet.DenseBlock))


def test_on_a_cpu_torch_compiles_all_models() -> None:
    images = random_images(64, 8, 1, 8)
    run = Run(Task("small DenseNet", "CAdam", 1e-3, 0, sudden(60), 1, 8, precision="bfloat16", compiled=True), images)
    assert not any(part.fused for part in run.model.modules() if isinstance(part, densenet.DenseBlock))


def handed_back(block: densenet.DenseBlock, x: torch.Tensor, half: bool) -> dict[str, torch.Tensor]:
    """What a block gives in training and after it; the gradients of its parameters and of what it was given."""
    block, x = copy.deepcopy(block), x.clone().requires_grad_()
    flags = torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False)
    with flags, torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
        given = x.to(torch.bfloat16) if half else x
        out = block(given)
        weights = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out)
        (weights * out).sum().backward()
        with torch.no_grad():
            after = block.eval()(given)
    assert x.grad is not None
    found = {"out": out.detach(), "after": after, "x": x.grad, **dict(block.named_buffers())}
    return found | {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


@on_cuda
@pytest.mark.parametrize(("size", "width", "window"), [(32, 64, 2), (16, 128, 2), (8, 256, 2), (4, 512, None)])
def test_blocks_in_bfloat16_are_as_near_to_float32_as_torch_s(size: int, width: int, window: int | None) -> None:
    """The four blocks of DenseNet-121 as they are tiled there, with two layers each."""
    torch.manual_seed(0)
    block = densenet.DenseBlock(2, width, 32, window).cuda()
    block = block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for part in block.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(part.weight)
            torch.nn.init.normal_(part.bias, 0, 0.3)
    x = torch.randn(128, width, size, size, device="cuda").contiguous(memory_format=torch.channels_last)
    exact, theirs = (handed_back(block, x, half) for half in (False, True))
    assert densenet.fuse(block)
    ours, again = (handed_back(block, x, True) for _ in range(2))
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        assert torch.equal(ours[name], again[name]), name
        found, allowed = ((each[name].float() - value).norm() / value.norm() for each in (ours, theirs))
        behind_all = "norm2" in name or "conv2" in name  # their gradient is rounded twice, see `Back`
        assert found < 1e-3 + (2 if behind_all else 1.1) * allowed, (name, float(found), float(allowed))


@on_cuda
def test_densenet_in_a_graph_gives_the_curve_of_the_plain_loop() -> None:
    images = random_images(640, 256, 3, 32).to(torch.device("cuda"))
    task = Task("DenseNet-121", "CAdam", 3e-4, 0, sudden(60) + noisy(20), 3, precision="bfloat16", compiled=True)
    records = []
    for graph in (False, True):
        run = Run(task, images, graph=graph)
        while run.advance():
            pass
        records.append(vars(run.record()))
    assert all((records[0][name] == records[1][name]).all() for name in records[0])
