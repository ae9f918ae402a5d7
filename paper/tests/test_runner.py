"""The runner: interruption and resumption, several processes, `force`, and failing runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from walks import ARMS, TUNED, WALK, make_spec

from cadam_paper.harness import runner, time_limit
from cadam_paper.harness.cache import Cache
from cadam_paper.harness.cuda_runs import device_of
from cadam_paper.harness.experiment import Experiment, Finished, Plan
from cadam_paper.harness.results import Results, RunSpec
from cadam_paper.harness.runner import Event, Request
from cadam_paper.harness.time_limit import TimeLimit

COMMAND = Path(__file__).parents[2] / "paper" / "tests" / "run_test_experiments.py"
SEEDS = 25


def run(
    folder: Path, seeds: int = 3, experiment: Experiment = WALK, force: bool = False
) -> tuple[Request, list[Event]]:
    events: list[Event] = []
    request = Request(experiment, Plan("quick", seeds))
    runner.run([request], Cache(folder), jobs=1, notify=events.append, force=force)
    return request, events


def bits(folder: Path, seeds: int) -> dict[str, object]:
    """Return the outcomes of results as bytes, without their provenance."""
    request = runner.read(Cache(folder), WALK, Plan("quick", seeds))
    assert request.complete
    return {
        r.spec.key(): (
            {name: value.hex() for name, value in r.outcome.metrics.items()},
            {name: (str(c.dtype), c.shape, c.tobytes()) for name, c in r.outcome.curves.items()},
        )
        for r in request.results
    }


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def count(events: list[Event]) -> Counter[str]:
    return Counter(event.kind for event in events)


def in_child(work: Callable[[], object]) -> int:
    """Start a process that computes the runs and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("LAB_TEST_LOG", str(path))
    return path


def test_running_again_computes_nothing(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert count(first[1]) == {"start": 6, "computed": 6}
    assert count(second[1]) == {"stored": 6}
    assert second[0].complete


def test_more_seeds_compute_only_the_new_ones(tmp_path: Path) -> None:
    run(tmp_path, 3)
    assert count(run(tmp_path, 5)[1]) == {"stored": 6, "start": 4, "computed": 4}


def test_all_first_seeds_are_computed_before_second_seeds(tmp_path: Path) -> None:
    _, events = run(tmp_path)
    done = [(event.spec.seed, event.spec.optimizer) for event in events if event.kind == "computed"]
    assert done == [(seed, arm) for seed in range(3) for arm in ARMS]


def test_experiments_are_computed_in_order(tmp_path: Path) -> None:
    requests = [Request(each, Plan("quick", 2)) for each in (WALK, replace(WALK, name="again", run_specs=other_specs))]
    events: list[Event] = []
    runner.run(requests, Cache(tmp_path), jobs=1, notify=events.append)
    done = [(event.experiment.name, event.spec.seed) for event in events if event.kind == "computed"]
    assert done == [(name, seed) for name in ("walk", "again") for seed in (0, 0, 1, 1)]


def other_specs(plan: Plan, found: Results) -> list[RunSpec]:
    return [make_spec(arm, 0.2, seed) for arm in ARMS for seed in plan.test_seeds()]


def test_repeat_seeds_are_computed_with_their_test_seeds(tmp_path: Path) -> None:
    def run_specs(plan: Plan, found: Results) -> list[RunSpec]:
        return [make_spec(ARMS[0], 0.1, seed) for seed in (*plan.test_seeds(), *plan.repeat_seeds())]

    _, events = run(tmp_path, 2, replace(WALK, run_specs=run_specs))
    assert [event.spec.seed for event in events if event.kind == "computed"] == [0, 20_000, 1, 20_001]


def test_force_computes_all_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = bits(tmp_path, 3)
    assert count(run(tmp_path, force=True)[1])["computed"] == 6
    assert bits(tmp_path, 3) == before


def test_phases_follow_each_other_and_resume(tmp_path: Path) -> None:
    request, events = run(tmp_path, experiment=TUNED)
    assert count(events)["computed"] == 12 + 6
    assert {r.spec.lr for r in request.results.tests()} == {0.01}, "the best on tuning seeds"
    assert count(run(tmp_path, experiment=TUNED)[1]) == {"stored": 18}


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_time_limit_ends_between_runs_and_the_next_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setenv("LAB_TEST_SLEEP", "0.3")
    events: list[Event] = []
    request = Request(WALK, Plan("quick", 10))
    limit = TimeLimit(1.0)
    runner.run([request], Cache(tmp_path), jobs=jobs, notify=events.append, limit=limit)
    done = count(events)["computed"]
    assert 0 < done < 20
    assert count(events) == {"start": done, "computed": done}
    assert limit.has_refused
    assert not request.complete
    assert len(request.results) == done
    monkeypatch.setenv("LAB_TEST_SLEEP", "0")
    assert count(run(tmp_path, 10)[1]) == {"stored": done, "start": 20 - done, "computed": 20 - done}


def test_runs_on_a_device_end_within_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: now))

    def compute(specs: Iterator[RunSpec]) -> Iterator[Finished]:
        nonlocal now
        for finished in one_after_the_other(specs):
            now += finished.seconds
            yield finished

    on_device = replace(WALK, side_by_side=lambda spec: True, compute_many=compute)
    request, limit = Request(on_device, Plan("quick", 10)), TimeLimit(0.7)
    runner.run([request], Cache(tmp_path), jobs=1, notify=lambda event: None, limit=limit)
    assert limit.has_refused
    assert not request.failed
    assert len(request.results) == 3  # a fourth run of 0.2 seconds would end after 0.8


def test_a_run_on_a_missing_gpu_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = make_spec(ARMS[0], 0.1, 0)
    assert device_of(replace(spec, settings={"device": "cpu"})).type == "cpu"
    with pytest.raises(RuntimeError, match="torch does not find one; --quick runs on the CPU"):
        device_of(replace(spec, settings={"device": "cuda"}))


def one_after_the_other(specs: Iterator[RunSpec]) -> Iterator[Finished]:
    for each in specs:
        yield Finished(each, WALK.compute(each), 0.2)


def test_results_are_the_same_after_twenty_kills(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, SEEDS)
    monkeypatch.setenv("LAB_TEST_SLEEP", "0.01")
    moments = random.Random(4)
    for left in reversed(range(20)):
        stored = files_in(broken)
        begun = len(log.read_text().splitlines())
        pid = in_child(lambda: run(broken, SEEDS))
        time.sleep(moments.uniform(0, 0.08))
        if not left:  # a slow host may have stored nothing so far
            wait_for(lambda: bool(files_in(broken)))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        again = set(log.read_text().splitlines()[begun:])
        done = {make_spec(a, 0.1, s).key() for a in ARMS for s in range(SEEDS) if _name(broken, a, s) in stored}
        assert not again & done, "a stored spec was computed again"
    assert 0 < len(files_in(broken)) < 2 * SEEDS, "the kills came too early or too late"
    run(broken, SEEDS)
    assert bits(broken, SEEDS) == bits(whole, SEEDS)
    assert names(broken) == names(whole)


def files_in(folder: Path) -> set[str]:
    """Return the names of the stored files."""
    return {path.stem for path in folder.glob("walk/*.json") if path.name != "plan.json"}


def _name(folder: Path, arm: str, seed: int) -> str:
    return Cache(folder).path(WALK, make_spec(arm, 0.1, seed)).stem


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_process_killed_while_writing_leaves_no_files(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole)
    Cache(broken).remember(WALK, Plan("quick", 3))

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> None:
        monkeypatch.setattr(Cache, "remember", lambda *_: None)
        monkeypatch.setattr(os, "fsync", die) if moment == "fsync" else monkeypatch.setattr(Path, "replace", die)
        run(broken)

    _, status = os.waitpid(in_child(killed), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert any(name.endswith(".new") for name in names(broken)), "it was not killed in the middle"
    run(broken)
    assert bits(broken, 3) == bits(whole, 3)
    assert names(broken) == names(whole)


def test_files_of_a_running_process_are_not_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    spec = make_spec("Adam", 0.1, 0)
    name = cache.path(WALK, spec).stem
    half = tmp_path / "walk" / f".{name}.new"
    half.parent.mkdir()
    half.touch()
    ready, go = os.pipe(), os.pipe()

    def hold() -> None:
        with Cache(tmp_path).lock(name, wait=True):
            os.write(ready[1], b"x")
            os.read(go[0], 1)

    pid = in_child(hold)
    os.read(ready[0], 1)
    assert cache.sweep() == []
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    assert cache.sweep() == [half]
    for end in (*ready, *go):
        os.close(end)


def test_two_processes_share_the_work(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TEST_SLEEP", "0.02")
    for pid in [in_child(lambda: run(tmp_path / "specs", 10)) for _ in range(3)]:
        assert os.waitpid(pid, 0)[1] == 0
    computed = Counter(log.read_text().splitlines())
    assert len(computed) == 20
    assert set(computed.values()) == {1}, "a spec was computed twice"
    assert count(run(tmp_path / "specs", 10)[1]) == {"stored": 20}


def test_a_damaged_result_is_reported_and_computed_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = bits(tmp_path, 3)
    cache = Cache(tmp_path)
    damaged = [cache.path(WALK, make_spec("Adam", 0.1, seed)) for seed in (0, 1)]
    damaged[0].write_bytes(damaged[0].read_bytes()[:100])
    damaged[1].write_text(damaged[1].read_text().replace('"seconds": ', '"seconds": 1'))
    request, events = run(tmp_path)
    assert count(events) == {"stored": 4, "damaged": 2, "start": 2, "computed": 2}
    assert all(str(path) in " ".join(e.message for e in events) for path in damaged)
    assert request.complete
    assert bits(tmp_path, 3) == before


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TEST_FAIL", "CAdam 1")
    request, events = run(tmp_path)
    assert count(events) == {"start": 6, "computed": 5, "failed": 1}
    assert [spec.seed for spec in request.missing] == [1]
    assert "failure of the test" in request.failed[make_spec("CAdam", 0.1, 1)]
    monkeypatch.delenv("LAB_TEST_FAIL")
    assert count(run(tmp_path)[1]) == {"stored": 5, "start": 1, "computed": 1}


def test_workers_compute_the_same_results(tmp_path: Path) -> None:
    run(tmp_path / "one", 4)
    request = Request(WALK, Plan("quick", 4))
    events: list[Event] = []
    runner.run([request], Cache(tmp_path / "two"), jobs=2, notify=events.append)
    assert count(events) == {"start": 8, "computed": 8}
    assert bits(tmp_path / "two", 4) == bits(tmp_path / "one", 4)
    assert names(tmp_path / "two") == names(tmp_path / "one")


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    call = [sys.executable, str(COMMAND), *arguments, "--cache", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_workers_end_with_the_command(tmp_path: Path, log: Path, how: signal.Signals) -> None:
    """After an interrupt or a kill, no process and no unfinished file is left, and the command can be resumed."""
    folder = tmp_path / "specs"
    process = command(folder, "reproduce", "walk", "--jobs", "2", LAB_TEST_SLEEP="300")
    wait_for(lambda: log.read_text().count("\n") >= 2)
    children = _children(process.pid)
    assert len(children) >= 2
    process.send_signal(how)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert how != signal.SIGINT or "continues from there" in errors
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    run(folder)
    run(tmp_path / "whole")
    assert bits(folder, 3) == bits(tmp_path / "whole", 3)
    assert names(folder) == names(tmp_path / "whole")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
