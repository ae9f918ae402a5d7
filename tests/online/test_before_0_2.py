"""Checkpoints and state dicts that version 0.1 wrote are loaded, and go on to what it went on to.

`tests/data/before-0.2` was written by that version: `python tests/online/test_before_0_2.py FOLDER` with its source.
What is restored is compared to the bit; what is computed from there to 1e-6, since processors round differently.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import cadam
from cadam import online
from cadam.online import Batch, Learner, LinesSource, Rejected, Schema, StreamMetrics, measure
from cadam.online.before_0_2 import OLD_TO_NEW, new_name
from cadam.online.data.limit import Portion
from cadam.online.distributed_learner import DistributedLearner
from tests.process_groups import run as worlds_run

WRITTEN = Path(__file__).parents[1] / "data" / "before-0.2"
SCHEMA = Schema({"user": "category:8", "price": "number"}, label="click", id="event:text", user="user", time="at")
CUT = 150  # events before the checkpoint: in the middle of a batch


# A learner's checkpoint --------------------------------------------------------------------------------------------


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(8, 2, sparse=True)
        self.out = nn.Linear(3, 1)
        with torch.no_grad():
            self.users.weight.copy_(torch.arange(16.0).view(8, 2) / 16 - 0.5)
            self.out.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
            self.out.bias.zero_()

    def forward(self, user: Tensor, price: Tensor) -> Tensor:
        score: Tensor = self.out(torch.cat([self.users(user), price[:, None]], 1)).squeeze(1)
        return score


def lines() -> list[str]:
    """Events with labels, labels that come later, twice, before their events or without any, and rejected lines."""
    found: list[dict[str, Any]] = []
    for row in range(300):
        event = {"event": f"e{row}", "user": row * 5 % 8, "price": row % 7 / 4 - 0.5, "at": float(row)}
        label = {"event": f"e{row - 20}", "click": (row - 20) * 5 % 8 // 4}
        found += [{**event, "click": row * 5 % 8 // 4} if row % 3 == 0 else event]
        found += [label] if row >= 20 and row % 3 and row % 4 else []
        found += [label] if row % 40 == 25 else []
        found += [{"event": f"e{row + 30}", "click": 1}] if row % 50 == 49 else []
        found += [{"event": f"never {row}", "click": 1}] if row % 45 == 44 else []
        found += [{**event, "event": f"bad {row}", "user": 8 + row}] if row % 25 == 12 else []
    return [json.dumps(record) for record in found]


def write_lines(folder: Path) -> None:
    (folder / "clicks.jsonl").write_text("\n".join(lines()) + "\n")


def learner(folder: Path) -> Learner:
    model = Clicks()
    return Learner(
        model,
        cadam.CAdam(model.named_parameters(), lr=0.05),
        nn.functional.binary_cross_entropy_with_logits,
        horizon=60,
        unmatched="negative",
        batch_size=16,
        remember=500,
        metrics=[StreamMetrics(40)],
        checkpoint=folder / "state",
        keep=1,
        log=folder / "log",
        log_rows=60,
    )


def learn(ours: Learner, folder: Path, events: int | None) -> None:
    source = LinesSource(folder / "clicks.jsonl", SCHEMA, "jsonl", batch_size=20)
    ours.run(Portion(source, events))


def tensors(ours: Learner) -> dict[str, list[float]]:
    """Weights and the optimizer's state, as numbers."""
    found = {name: value.flatten().tolist() for name, value in ours.model.state_dict().items()}
    for param, state in ours.optimizer.state_dict()["state"].items():
        found |= {f"{param} {name}": torch.as_tensor(value).flatten().tolist() for name, value in state.items()}
    return found


def waiting(ours: Learner) -> dict[str, Any]:
    """What waits for labels, and which labels wait for events."""
    pending = ours.pending
    return {"place": dict(pending.place), "early": {key: list(value) for key, value in pending.early.items()}}


def end(ours: Learner, folder: Path) -> dict[str, Any]:
    import pyarrow.parquet as pq

    return {
        "tensors": tensors(ours),
        "metrics": ours.metrics(),
        "log": pq.read_table(folder / "log").to_pydict(),
    }


def write_learner(folder: Path) -> None:
    folder.mkdir()
    write_lines(folder)
    ours = learner(folder)
    learn(ours, folder, CUT)
    at_checkpoint = {"tensors": tensors(ours), "metrics": ours.metrics(), **waiting(ours)}
    ours.close()
    shutil.copytree(folder, folder.with_name("goes on"))
    ours = learner(folder.with_name("goes on"))
    learn(ours, folder.with_name("goes on"), None)
    ours.finish()
    assert ours.log is not None
    ours.log.flush()
    record = {"at checkpoint": at_checkpoint, "at end": end(ours, folder.with_name("goes on"))}
    ours.close()
    shutil.rmtree(folder.with_name("goes on"))
    (folder / "state" / ".lock").unlink()
    (folder / "clicks.jsonl").unlink()
    (folder / "recorded.json").write_text(json.dumps(record))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of what was written."""
    folder = tmp_path / "old"
    shutil.copytree(WRITTEN / "learner", folder)
    write_lines(folder)
    return folder


def recorded() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((WRITTEN / "learner" / "recorded.json").read_text())
    return content


def same_metrics(found: dict[str, float], expected: dict[str, float], **tolerance: float) -> None:
    assert {new_name(name) for name in expected} <= set(found)
    for name, value in expected.items():
        assert found[new_name(name)] == pytest.approx(value, nan_ok=True, **tolerance), name


def test_a_checkpoint_of_0_1_is_restored_to_the_bit(old: Path) -> None:
    ours, expected = learner(old), recorded()["at checkpoint"]
    assert ours.resume()
    assert ours.events == CUT
    assert tensors(ours) == expected["tensors"]
    assert waiting(ours) == waiting_of(expected)
    assert all(waiting_of(expected).values())
    same_metrics(ours.metrics(), expected["metrics"], rel=0, abs=0)
    ours.close()


def test_a_checkpoint_of_0_1_goes_on_as_0_1_did(old: Path) -> None:
    ours, expected = learner(old), recorded()["at end"]
    learn(ours, old, None)
    assert ours.resumed
    ours.finish()
    assert ours.log is not None
    ours.log.flush()
    found = end(ours, old)
    ours.close()
    for name, value in expected["tensors"].items():
        assert found["tensors"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    same_metrics(found["metrics"], expected["metrics"], rel=1e-6, abs=1e-6)
    log, before = found["log"], expected["log"]
    assert len(log["id"]) == 300
    assert log == {**before, "score": pytest.approx(before["score"], rel=1e-6, abs=1e-6)}


def test_the_reject_file_of_0_1_is_renamed_and_gone_on_with(old: Path) -> None:
    before = (old / "state" / "set-aside.jsonl").read_bytes()
    assert before.count(b"\n") == 6
    ours = learner(old)
    learn(ours, old, None)
    ours.close()
    assert not (old / "state" / "set-aside.jsonl").exists()
    after = (old / "state" / "rejected.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 12


# A checkpoint of ranks ---------------------------------------------------------------------------------------------


def learn_on_a_rank(folder: Path, events: int) -> dict[str, Any]:
    """So many events in all, on the one rank of a job."""
    model = DistributedDataParallel(Clicks())
    optimizer = cadam.CAdam(model.named_parameters(), lr=0.05)
    loss = nn.functional.binary_cross_entropy_with_logits
    ours = DistributedLearner(model, optimizer, loss, horizon=60, checkpoint=folder / "state", keep=1)
    resumed = ours.resume()
    found = {"tensors": tensors(ours), "metrics": ours.metrics(), **waiting(ours)}
    source = LinesSource(folder / "clicks.jsonl", SCHEMA, "jsonl", batch_size=20)
    ours.run(source, events=events)
    ours.close()
    return {"resumed": resumed, "found": found, "end": {"tensors": tensors(ours), "metrics": ours.metrics()}}


def write_ranks(folder: Path, worlds: Path) -> None:
    folder.mkdir()
    write_lines(folder)
    worlds_run(1, worlds / "first", learn_on_a_rank, folder, 120)
    shutil.copytree(folder, worlds / "goes on")
    record = worlds_run(1, worlds / "second", learn_on_a_rank, worlds / "goes on", 300)
    (folder / "state" / ".lock").unlink()
    (folder / "clicks.jsonl").unlink()
    (folder / "recorded.json").write_text(json.dumps(record))


def test_a_checkpoint_of_ranks_of_0_1_is_restored_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(WRITTEN / "ranks", folder)
    write_lines(folder)
    found = worlds_run(1, tmp_path / "world", learn_on_a_rank, folder, 300)
    expected = json.loads((WRITTEN / "ranks" / "recorded.json").read_text())
    assert found["resumed"]
    assert found["found"]["tensors"] == expected["found"]["tensors"]
    assert waiting_of(found["found"]) == waiting_of(expected["found"])
    same_metrics(found["found"]["metrics"], expected["found"]["metrics"], rel=0, abs=0)
    for name, value in expected["end"]["tensors"].items():
        assert found["end"]["tensors"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    same_metrics(found["end"]["metrics"], expected["end"]["metrics"], rel=1e-6, abs=1e-6)
    before = (WRITTEN / "ranks" / "state" / "set-aside" / "rank-0.jsonl").read_bytes()
    after = (folder / "state" / "rejected" / "rank-0.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 12


def waiting_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("place", "early")}


# An optimizer's state dict -----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "CAdam": lambda params: cadam.CAdam(params, lr=0.01, weight_decay=0.1),
    "CAdamW": lambda params: cadam.CAdamW(params, lr=0.02, betas=(0.8, 0.95)),
    "AmsGrad": lambda params: cadam.AmsGrad(params, lr=0.03),
    "CAmsGrad": lambda params: cadam.CAmsGrad(params, lr=0.04, eps=1e-6),
}


def parameters() -> dict[str, nn.Parameter]:
    dense = torch.arange(12.0).view(3, 4) / 8 - 0.5
    return {"dense": nn.Parameter(dense), "rows": nn.Parameter(torch.arange(10.0).view(5, 2) / 16)}


def step(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter], number: int) -> None:
    """A dense gradient and, of two rows, a sparse one; their signs change from step to step."""
    signs = torch.from_numpy((np.arange(12) * 7 + number * 5) % 3 - 1.0).float().view(3, 4)
    params["dense"].grad = signs * (number + 1) / 4
    rows = torch.tensor([[number % 5, (number + 2) % 5]])
    values = torch.tensor([[0.5, -0.25], [(-1.0) ** number, 0.125]])
    params["rows"].grad = torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)
    optimizer.step()


def optimizer(name: str, params: dict[str, nn.Parameter]) -> Any:
    groups = [{"params": [("dense", params["dense"])]}, {"params": [("rows", params["rows"])], "weight_decay": 0.0}]
    return OPTIMIZERS[name](groups)


def write_optimizers(folder: Path) -> None:
    folder.mkdir()
    for name in OPTIMIZERS:
        params = parameters()
        ours = optimizer(name, params)
        for number in range(4):
            step(ours, params, number)
        saved = {"weights": {n: p.detach().clone() for n, p in params.items()}, "optimizer": ours.state_dict()}
        torch.save(saved, folder / f"{name}.pt")
        for number in range(4, 8):
            step(ours, params, number)
        torch.save({n: p.detach() for n, p in params.items()}, folder / f"{name}-after.pt")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dict_of_0_1_is_restored_and_goes_on(name: str) -> None:
    saved = torch.load(WRITTEN / "optimizers" / f"{name}.pt", weights_only=True)
    params = {n: nn.Parameter(value.clone()) for n, value in saved["weights"].items()}
    ours = optimizer(name, params)
    ours.load_state_dict(saved["optimizer"])
    now = ours.state_dict()
    assert_close(now["state"], saved["optimizer"]["state"], rtol=0, atol=0)
    for group, before in zip(now["param_groups"], saved["optimizer"]["param_groups"], strict=True):
        later = {"prepared": True, "moments": "float32", "second_moment": "element", "row_steps": False}
        assert group == {**before, **later}, "options that came later have their defaults"
    for number in range(4, 8):
        step(ours, params, number)
    after = torch.load(WRITTEN / "optimizers" / f"{name}-after.pt", weights_only=True)
    assert_close({n: p.detach() for n, p in params.items()}, after, rtol=1e-6, atol=1e-6)


# Names that changed ------------------------------------------------------------------------------------------------


def test_old_names_of_options_and_classes_are_taken_with_a_warning(tmp_path: Path) -> None:
    model = Clicks()
    optimizer, loss = cadam.CAdam(model.parameters()), nn.functional.binary_cross_entropy_with_logits
    with pytest.warns(DeprecationWarning, match="set_aside is now called rejected"):
        ours = Learner(model, optimizer, loss, set_aside=tmp_path / "bad.jsonl")
    assert ours.reject_file is not None
    assert ours.reject_file.path == tmp_path / "bad.jsonl"
    with pytest.warns(DeprecationWarning, match="poisoned is now called rejected"):
        assert getattr(ours, "poisoned") == 0  # noqa: B009
    ours.close()
    with pytest.raises(TypeError, match="give only the new one"):
        Learner(model, optimizer, loss, set_aside="a", rejected="b")
    with pytest.warns(DeprecationWarning, match="Rejected"):
        assert online.Poison is Rejected
    bad = [Rejected("why", "where", "what", 4)]
    with pytest.warns(DeprecationWarning, match="poison is now called rejected"):
        batch = Batch(poison=bad)
    with pytest.warns(DeprecationWarning, match="Batch.poison"):
        assert batch.poison == batch.rejected == bad
    with pytest.warns(DeprecationWarning, match="log_loss"):
        assert StreamMetrics(kinds=["auc", "log loss"]).kinds == ("auc", "log_loss")


def test_old_names_of_metrics_find_their_values_with_a_warning() -> None:
    found = measure(np.array([0.5, -0.5]), np.array([1, 0]))
    with pytest.warns(DeprecationWarning, match="'log loss' is now called 'log_loss'"):
        assert found["log loss"] == found["log_loss"]
    with pytest.raises(KeyError):
        found["gauc by user"]  # there are no users
    assert new_name("gauc by impressions/mean of windows") == "gauc_by_impressions/mean_of_windows"
    assert new_name("alignment of out.weight, touched") == "alignment_over_touched/out.weight"
    assert all(name.isidentifier() for name in OLD_TO_NEW.values())


def write(folder: Path) -> None:
    folder.mkdir()
    write_learner(folder / "learner")
    write_optimizers(folder / "optimizers")
    with tempfile.TemporaryDirectory() as worlds:
        write_ranks(folder / "ranks", Path(worlds))


if __name__ == "__main__":
    from tests.online import test_before_0_2  # by its name: ranks are processes that import it

    test_before_0_2.write(Path(sys.argv[1]))
