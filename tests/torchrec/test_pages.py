"""The code of the pages on TorchRec and the examples runs, on one rank and on two."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

try:
    import cadam.torchrec
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

import cadam.online.distributed_learner
from tests.documented import blocks
from tests.process_groups import run

ROOT = Path(__file__).parents[2]
TRAIN, SERVE, SLOTS, ONLINE = (
    block.code
    for page in ("large_tables", "torchrec", "distributed_learner")
    for block in blocks(ROOT / "docs" / f"{page}.md")
    if block.marks.get("tested in") == "tests/torchrec/test_pages.py"
)


def execute(code: str, folder: str) -> dict[str, Any]:
    """Run code of the page. The process group exists already and is kept."""
    os.chdir(folder)
    for module in (cadam.torchrec, cadam.online.distributed_learner):
        module.join = lambda backend: None  # type: ignore[attr-defined]
        module.leave = lambda: None  # type: ignore[attr-defined]
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    return names


def train_and_serve(folder: str) -> tuple[int, bool]:
    """Run the code twice. Return the step that the second run resumed at, and whether the serving copy is exact."""
    execute(TRAIN + SERVE, folder)
    names = execute(TRAIN + SERVE, folder)
    whole = torch.empty(names["weight"].size()) if dist.get_rank() == 0 else None
    names["weight"].gather(out=whole)
    return names["saved"].position["batch"], whole is None or torch.equal(whole, names["serving"]["users"])


def give_slots(folder: str) -> list[int]:
    return list(execute(SLOTS, folder)["embeddings"]["user"].shape)


def learn(folder: str) -> int:
    return int(execute(ONLINE, folder)["learner"].metrics()["learned"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_code_of_the_page(ranks: int, tmp_path: Path) -> None:
    assert run(ranks, tmp_path / "train", train_and_serve, str(tmp_path)) == (10, True)
    assert run(ranks, tmp_path / "slots", give_slots, str(tmp_path)) == [2, 16]
    example = runpy.run_path(str(ROOT / "examples" / "online_dlrm.py"))
    example["make"](tmp_path / "clicks", ranks, 7_000)  # 70 seconds: the horizon of the first batches ends after 60
    assert run(ranks, tmp_path / "learn", learn, str(tmp_path)) == {1: 762, 2: 1_274}[ranks]  # one batch of each rank


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_example_without_the_requested_device_says_so() -> None:
    command = [sys.executable, str(ROOT / "examples" / "dlrm.py"), "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "--device cuda: this torch sees no CUDA device" in result.stderr


@pytest.mark.parametrize("example", ["dlrm.py", "online_dlrm.py"])
def test_examples_say_what_to_install(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice appears even if TorchRec cannot be imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchrec" or name.startswith("cadam.torchrec")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.1")
    with pytest.raises(ImportError, match=r"cadam.torchrec cannot be used: torch 0.1 \(needs 2.13.0\).*Install: pip"):
        runpy.run_path(str(ROOT / "examples" / example))
