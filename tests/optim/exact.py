"""Comparing bit for bit, and values that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def present(value: T | None) -> T:
    """A value that might be missing, and is not."""
    assert value is not None
    return value


def assert_identical(actual: Any, expected: Any, where: str = "") -> None:
    """Assert equal structures with equal values, and equal dtypes and devices of tensors. NaN equals NaN."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        assert (actual.dtype, actual.device) == (expected.dtype, expected.device), where
        torch.testing.assert_close(
            actual.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_identical(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(a, e, f"{where}[{i}]")
    else:
        assert actual == expected or (actual != actual and expected != expected), where


def copied(value: Any) -> Any:
    """A copy of a structure that shares no tensor with it; parameters in it come out as plain tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each) for each in value)
    return value
