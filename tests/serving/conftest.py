"""Tests in one process exchange no files through shared memory, where they would stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadam.serving import config


@pytest.fixture(autouse=True)
def _private_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "SHARED_MEMORY", tmp_path)
