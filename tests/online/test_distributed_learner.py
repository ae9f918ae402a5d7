"""Several ranks that learn from shares of a stream give the same result as one process that learns from all of it."""

from __future__ import annotations

import ast
import json
import logging
import os
import pkgutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from cadam import CAdam, Ratio, online
from cadam.checkpoint_files import write_tree
from cadam.distributed import process_group, sharded_checkpoint, table_protocol
from cadam.online import Batch, DamagedCheckpointError, recompute
from cadam.online.distributed_learner import DistributedLearner
from cadam.optim.alignment import Alignment
from tests.online.ranks import SIZES, Plain, kill_and_compare, learn_rounds, learner, shares, stop_and_go_on
from tests.online.streams import Replayed, events
from tests.process_groups import run


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert set(a) == set(b), set(a) ^ set(b)
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


DAMAGES = ("", "__1_0.distcp", "rank-1.safetensors", "checkpoint.json")


def with_a_full_disk(kind: str, folder: Path) -> dict[str, Any]:
    """Rank 1 cannot write its part of the second checkpoint."""
    import torch.distributed as dist

    tried: list[Path] = []

    def full(path: Path, tree: Any) -> None:
        tried.append(path)
        if dist.get_rank() == 1 and len(tried) == 2:
            raise OSError("no space left")
        write_tree(path, tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "write_tree", full)
        return learn_rounds(kind, True, folder, checkpoint=folder / "state", checkpoint_every=100)


def learn_and_resume(kind: str, folder: Path, damages: tuple[str, ...]) -> dict[str, Any]:
    """Results with immediate labels, with late labels, and after resuming with a damaged file."""
    learned = {f"late {late}": learn_rounds(kind, late, folder / f"late {late}") for late in (False, True)}
    learned["full"] = with_a_full_disk(kind, folder / "full")
    return {**learned, **{damage: stop_and_resume(kind, folder / f"damaged {damage}", damage) for damage in damages}}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("learned")
    return run(2, folder / "world", learn_and_resume, "ddp", folder, DAMAGES), folder


@pytest.mark.parametrize("late", [False, True])
def test_two_ranks_equal_one_process_on_the_union(
    late: bool, learned: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    results, folder = learned
    same_as_one_process(results[f"late {late}"], learn_rounds("alone", late, tmp_path), folder / f"late {late}")


def same_as_one_process(two: dict[str, Any], alone: dict[str, Any], folder: Path) -> None:
    assert furthest(two["tensors"], alone["tensors"]) < 1e-5
    assert two["metrics"]["events"] == sum(map(sum, SIZES))
    assert two["metrics"]["labeled"] == two["metrics"]["learned"] == two["metrics"]["events/total"] > 500
    assert two["events"] == sum(first for first, _ in SIZES)
    numbers = {name: value for name, value in two["metrics"].items() if not name.startswith("alignment")}
    of_one = {name: value for name, value in alone["metrics"].items() if not name.startswith("alignment")}
    assert numbers == pytest.approx(of_one, rel=1e-5, nan_ok=True)
    assert 0 < numbers["auc/window"] < 1
    of_log = recompute(folder / "log")
    assert numbers["log_loss"] == pytest.approx(of_log["log_loss"], rel=1e-9)
    assert numbers["calibration/total"] == pytest.approx(of_log["calibration"], rel=1e-9)


# Checkpoints -------------------------------------------------------------------------------------------------------


def stop_and_resume(kind: str, folder: Path, damage: str) -> dict[str, Any]:
    """Learn half of the stream, damage the newest checkpoint, and resume."""
    import torch.distributed as dist

    options: dict[str, Any] = {"checkpoint": folder / "state", "checkpoint_every": 100}
    half = learn_rounds(kind, True, folder, upto=300, finish=False, **options)
    assert half["metrics"]["events"] >= 300
    files = sorted((folder / "state").glob("checkpoint-*"))
    if dist.get_rank() == 0:
        for path in [files[-1] / damage] if damage else []:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    dist.barrier()
    whole = learn_rounds(kind, True, folder, **options)
    return {**whole, "aside": [path.name for path in (folder / "state").glob("*.damaged")]}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resumed_from_the_newest_good_checkpoint(damage: str, learned: tuple[dict[str, Any], Path]) -> None:
    resumed_from_the_newest_good_checkpoint(learned[0], damage)


def resumed_from_the_newest_good_checkpoint(learned: dict[str, Any], damage: str) -> None:
    whole, found = learned["late True"], learned[damage]
    assert found["resumed"]
    assert not whole["resumed"]
    assert furthest(found["tensors"], whole["tensors"]) == 0
    assert found["metrics"] == pytest.approx(whole["metrics"], rel=0, abs=0, nan_ok=True)
    assert len(found["aside"]) == (damage != "")
    assert ("damaged checkpoint, trying the previous one" in "".join(found["logged"])) == (damage != "")


def test_a_checkpoint_that_one_rank_cannot_write_is_discarded_on_all_ranks(
    learned: tuple[dict[str, Any], Path],
) -> None:
    full = learned[0]["full"]
    assert full["failed_saves"] == 1
    assert "learning continues: rank 1: no space left" in "".join(full["logged"])
    assert furthest(full["tensors"], learned[0]["late True"]["tensors"]) == 0
    kept = {path.name for path in (learned[1] / "full" / "state").glob("checkpoint-*")}
    assert "checkpoint-000000000002" not in kept
    assert len(kept) == 3


def refuse(folder: Path) -> str:
    with pytest.raises(ValueError, match="saved by 2 ranks") as caught:
        learn_rounds("ddp", True, folder, checkpoint=folder / "state")
    return str(caught.value)


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_resuming_with_another_number_of_ranks_raises(
    world: int, learned: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    assert f"here are {world}: start 2" in run(world, tmp_path / "world", refuse, learned[1] / "damaged ")


def refuse_damaged(folder: Path) -> None:
    learn_rounds("ddp", True, folder, upto=100, checkpoint=folder / "state")
    about = json.loads((folder / "state" / "checkpoint-000000000002" / "checkpoint.json").read_text())
    some = {name: digest for name, digest in about["sha256"].items() if name != ".metadata"}
    contents: list[Any] = [{}, [], {**about, "ranks": 2}, {**about, "ranks": "1"}, {**about, "sha256": some}]
    for content in contents:
        for path in (folder / "state").glob("checkpoint-*"):
            (path / "checkpoint.json").write_text(json.dumps(content))
        with pytest.raises(DamagedCheckpointError, match="all 2 checkpoints"):
            learn_rounds("ddp", True, folder, checkpoint=folder / "state")
    plain = Plain()
    with pytest.raises(TypeError, match="wrap it in DistributedDataParallel"):
        DistributedLearner(plain, CAdam(plain.parameters()), nn.functional.binary_cross_entropy_with_logits)


def test_training_does_not_restart_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    run(1, tmp_path / "world", refuse_damaged, tmp_path)


def run_twice(folder: Path) -> float:
    """The share of the second rank is empty in both batches."""
    import torch.distributed as dist

    ours = learner("ddp", checkpoint=folder / "state")
    with pytest.raises(RuntimeError, match="another process writes its checkpoints"):
        learner("ddp", checkpoint=folder / "state")
    for part in range(2):
        share = [] if dist.get_rank() else [Batch(events(8, seed=part, first=8 * part))]
        ours.run(Replayed(share))
    ours.close()
    return ours.metrics()["events"]


def test_run_can_be_called_again_on_a_rank_without_events(tmp_path: Path) -> None:
    assert run(2, tmp_path / "world", run_twice, tmp_path, seconds=60) == 16


def hooks() -> list[str]:
    """The owners of the hooks, and the log messages."""
    models = [DistributedDataParallel(Plain()) for _ in range(2)]
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("cadam.online")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    models[1].register_comm_hook(None, allreduce_hook)
    for model in models:
        DistributedLearner(model, CAdam(model.parameters()), nn.functional.binary_cross_entropy_with_logits).close()
    return [*(hook.__module__ for model in models for hook, _ in model._comm_hooks), *logged]


def test_sparse_gradients_are_exchanged_as_rows_unless_the_model_has_a_hook(tmp_path: Path) -> None:
    ours, own, warning = run(1, tmp_path / "world", hooks)
    assert (ours, own) == ("cadam.optim.ddp", allreduce_hook.__module__)
    assert "communication hook" in warning


# Meeting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_started_by_torchrun_join_one_group(
    nodes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_RESTART_COUNT": 2}
    where = {"MASTER_ADDR": "here", "MASTER_PORT": 1, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in {**given, **where}.items():
        monkeypatch.setenv(name, str(value))
    devices: list[int] = []
    groups: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *given, **named: "agent")
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda *given: given)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **given: groups.append((backend, given))
    )
    process_group.join("gloo")
    assert devices == []
    process_group.join("cpu:gloo,cuda:nccl")
    assert devices == [1]
    assert groups[1] == ("cpu:gloo,cuda:nccl", {"store": ("attempt 2", "agent"), "rank": 3, "world_size": 4})
    assert ("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == (nodes > 1)


# Ending ------------------------------------------------------------------------------------------------------------

LATE = """
import atexit

def release_late():
    print("at exit")
    sys.setswitchinterval(100)
    size = 1 << 24  # so large that it takes longer than the call
    dist.all_gather([torch.empty(size)], torch.ones(size), async_op=True, group=group)
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        pass

atexit.register(release_late)  # before all others, so that it is called last
import sys, time
import torch, torch.distributed as dist
from cadam.online.distributed_learner import join, leave

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # in the middle of a shutdown, and without the GIL

slow = Slow()
join("gloo")
slow.group = group = dist.new_group(backend="gloo")
print("all work is done")
leave()
"""


def test_a_rank_exits_with_code_0_while_a_gloo_thread_is_running() -> None:
    """A thread still has to release a tensor when Python shuts down, which would abort the process."""
    given = {name: value for name, value in os.environ.items() if name != "RANK"}
    rank = subprocess.run([sys.executable, "-c", LATE], env=given, capture_output=True, text=True, timeout=120)
    assert (rank.returncode, rank.stdout) == (0, "all work is done\nat exit\n"), rank.stderr


ENDS = """
import sys, time
from cadam.online.distributed_learner import join, leave

join("gloo")
if sys.argv[1] == "fails":
    raise SystemExit(3)
if sys.argv[1] == "is late":
    time.sleep(3)
print(time.monotonic())
leave()
"""


def end_of_two(second: str) -> tuple[list[int], list[str], float]:
    """Return exit codes and outputs of two ranks, the first of which has nothing to do, and the time when it ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, does],
            env={**os.environ, **where, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, does in enumerate(["nothing", second])
    ]
    try:
        printed = [processes[0].communicate(timeout=120)[0]]
        ended = time.monotonic()
        printed.append(processes[1].communicate(timeout=120)[0])
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed, ended


def test_ranks_end_together() -> None:
    codes, (_, late), ended = end_of_two("is late")
    assert codes == [0, 0]
    assert ended > float(late)


def test_all_ranks_fail_if_one_fails() -> None:
    codes, _, _ = end_of_two("fails")
    assert codes == [1, 3]


# Killed and stopped ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    kill_and_compare("ddp", 10, 0, shares(tmp_path / "data"), tmp_path)


@pytest.mark.slow
def test_sigterm_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    stop_and_go_on("ddp", shares(tmp_path / "data"), tmp_path)


class Fused(DistributedDataParallel):
    """A model that declares that it updates its tables in backward."""

    def __init__(self) -> None:
        super().__init__(Plain())
        self.fused_optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)


def tables_of_a_stranger(folder: Path) -> list[Ratio]:
    counted = Alignment(Ratio(1, 2, 4), (Ratio(1, 2, 4),), {"table": Ratio(1, 2, 4)})
    table_protocol.register_alignment(lambda model: counted)
    numbers = []
    for _ in range(2):
        model = Fused()
        own = CAdam(model.named_parameters(), lr=0.01)
        loss = nn.functional.binary_cross_entropy_with_logits
        ours = DistributedLearner(model, own, loss, checkpoint=folder / "state")
        ours.run(Replayed([Batch(events(8))]))
        ours.close()
        numbers.append(ours.alignment()["table"])
    return numbers


def test_registered_functions_count_the_alignment_of_tables(tmp_path: Path) -> None:
    found = run(1, tmp_path / "world", tables_of_a_stranger, tmp_path)
    assert found == [Ratio(1, 2, 4), Ratio(2, 4, 8)]  # the second has continued from the state of the first


def test_the_learner_does_not_import_torchrec() -> None:
    names = [module.name for module in pkgutil.walk_packages(online.__path__, "cadam.online.")]
    code = (
        f"import importlib, sys; [importlib.import_module(n) for n in {names}]; print('cadam.torchrec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    for path in Path(online.__file__).parent.rglob("*.py"):
        found = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert not [node for node in found if "torchrec" in ast.unparse(node)], path


def test_batches_that_grow_are_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="leave out batch_growth"):
        DistributedLearner(model, CAdam(model.parameters()), nn.functional.mse_loss, batch_growth=online.BatchGrowth())
