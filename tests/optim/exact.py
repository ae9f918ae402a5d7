"""Comparison of structures bit for bit, and access to optional values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return a value after asserting that it is not None."""
    assert value is not None
    return value


def assert_identical(actual: Any, expected: Any, where: str = "") -> None:
    """Assert that structures, values, dtypes and devices are equal. NaN equals NaN."""
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
    """Return a copy of a structure that shares no tensor with it. Parameters become plain tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each) for each in value)
    return value
