"""The networks of the image study."""

from __future__ import annotations

import pytest
import torch

from cadam_paper.images import models

PUBLISHED = {"VGG-16": 14_728_266, "ResNet-18": 11_173_962, "DenseNet-121": 6_956_298}
LEFT_OUT = {"VGG-16": 64 * 2 + 128 * 2 + 256 * 3 + 512 * 6}
"""Numbers of convolution biases in the published models, which have no effect before batch normalization."""


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    with torch.device("meta"):
        model = models.MODELS[name](3, 10)
        assert sum(p.numel() for p in model.parameters()) + LEFT_OUT.get(name, 0) == count
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)


SMALL = [name for name in models.MODELS if name.startswith("small")]


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_determines_the_weights_and_preserves_the_random_state(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (models.build(name, 1, 10, seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_of_a_small_model_gets_a_gradient(name: str) -> None:
    model = models.build(name, 1, 10, 0)
    model(torch.randn(4, 1, 10, 10)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.ndim > 1)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"'VGG-17'.*VGG-16"):
        models.build("VGG-17", 3, 10, 0)
