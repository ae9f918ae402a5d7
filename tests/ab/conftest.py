"""Fixtures of the tests of the A/B."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ab.helpers import write_clicks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a stream of clicks, its schema and a model."""
    write_clicks(tmp_path)
    return tmp_path
