"""Training of the image models: input images, recorded curves, and concurrent runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import cadam
from cadam_paper.harness.control_arms import CAUTIOUS, CONTROL_ARMS, LONG_MOMENTUM, RANDOM
from cadam_paper.harness.cuda_runs import run_concurrently
from cadam_paper.images import data, models, train
from cadam_paper.images.data import Images
from cadam_paper.images.streams import CLEAN, TRUE_LABEL, Stream, augmented, continuous, noisy, parse, sudden
from cadam_paper.images.train import Record, Run, Task

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images() -> Images:
    return data.load("digits", CPU)


def task(stream: Stream = CLEAN, optimizer: str = "CAdam", seed: int = 0, epochs: int = 1) -> Task:
    return Task("small VGG", optimizer, 1e-2, seed, stream, epochs, batch=64)


def finish(run: Run) -> Record:
    while run.advance():
        pass
    return run.record()


# Input images --------------------------------------------------------------------------------------------------


def raw(run: Run, seen: torch.Tensor) -> torch.Tensor:
    shape = (1, -1, 1, 1)
    return seen * run.images.std.view(shape) + run.images.mean.view(shape)


@pytest.mark.parametrize("quarter", [0, 1, 2, 3])
def test_rotations_by_90_degrees_are_exact(images: Images, quarter: int) -> None:
    run = Run(task(), images)
    view = torch.from_numpy(train.rotations(np.array([90.0 * quarter])))
    seen = raw(run, run.transform(images.train[:5], view))
    torch.testing.assert_close(seen, torch.rot90(images.train[:5], quarter, (2, 3)).float(), rtol=0, atol=1e-2)


def test_corners_are_black_after_a_rotation_by_45_degrees(images: Images) -> None:
    run = Run(task(), images)
    white = torch.full_like(images.train[:2], 255)
    seen = raw(run, run.transform(white, torch.from_numpy(train.rotations(np.array([45.0])))))
    assert seen[:, :, 0, 0].abs().max() < 1e-2
    assert (seen[:, :, 4:6, 4:6] - 255).abs().max() < 1e-2


def test_images_are_translated_mirrored_and_then_rotated(images: Images) -> None:
    run = Run(task(augmented(2) + sudden(90), epochs=2), images)
    schedule, step = run.schedule, run.schedule.steps_per_epoch
    index = torch.from_numpy(schedule.order[step])
    moves = torch.from_numpy(train.moves(schedule, images.train.shape[-2:]))[step]
    view = moves @ torch.from_numpy(train.rotations(schedule.angle[step : step + 1]))
    seen = raw(run, run.transform(images.train[index], view))
    for number in range(8):
        down, right = schedule.shift[step, number].tolist()
        flipped = images.train[index[number]].flip(2) if schedule.flip[step, number] else images.train[index[number]]
        right = -right if schedule.flip[step, number] else right
        moved = F.pad(flipped.float(), (2 + right, 2 - right, 2 + down, 2 - down))[:, 2:-2, 2:-2]
        torch.testing.assert_close(seen[number], torch.rot90(moved, 1, (1, 2)), rtol=0, atol=1e-2)


# Recorded curves ----------------------------------------------------------------------------------------------


def test_a_run_learns_and_records_every_step(images: Images) -> None:
    record = finish(Run(task(epochs=3), images))
    assert len(record.loss) == len(record.accuracy) == len(record.alignment) == 3 * (1437 // 64)
    assert record.test_accuracy[-1] > 0.9
    assert record.accuracy[-5:].mean() > 0.9
    assert record.loss[-1] < record.loss[0] / 3
    assert record.alignment[0] == pytest.approx(1, abs=0.05)
    assert 0.4 < record.alignment[5:].min() <= record.alignment[5:].max() < 0.9


@pytest.mark.parametrize("arm", [CAUTIOUS, RANDOM, LONG_MOMENTUM])
def test_a_control_arm_learns_and_differs_from_adam(images: Images, arm: str) -> None:
    record, adam = (finish(Run(task(optimizer=name, epochs=2), images)) for name in (arm, "Adam"))
    assert record.loss[0] == adam.loss[0]
    assert record.loss[-1] != adam.loss[-1]
    assert record.test_accuracy[-1] > 0.8
    assert record.alignment[0] == pytest.approx(1, abs=0.05)
    assert 0.4 < record.alignment[5:].min() <= record.alignment[5:].max() < 0.9


def test_the_step_equals_a_plain_torch_step(images: Images) -> None:
    """Each step starts from the state of the run and is repeated with plain torch operations."""
    run = Run(task(sudden(90) + noisy(30), epochs=2), images)
    twin = Run(task(epochs=2), images)
    model, optimizer, schedule = twin.model, twin.optimizer, run.schedule
    assert isinstance(optimizer, cadam.Optimizer)
    expected, moved = [], []
    for step in range(len(schedule.order)):
        model.load_state_dict(run.model.state_dict())
        optimizer.load_state_dict(run.optimizer.state_dict())
        before = [p.detach().clone() for p in model.parameters()]
        index, shown = torch.from_numpy(schedule.order[step]), torch.from_numpy(schedule.labels[step])
        own = images.train_labels[index]
        turned = torch.rot90(images.train[index], int(schedule.angle[step]) // 90, (2, 3)).float()
        logits = model((turned - images.mean) / images.std)
        loss = F.cross_entropy(logits, own if shown[0] == TRUE_LABEL else shown)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        aligned = optimizer.alignment(reset=True).total.over_all
        expected.append((loss.item(), (logits.argmax(1) == own).float().mean().item(), aligned))
        assert run.advance()
        if (step + 1) % schedule.steps_per_epoch == 0:
            assert run.advance()  # the evaluation at the end of the epoch
        steps = [(a - b, c - b) for a, b, c in zip(run.model.parameters(), before, model.parameters(), strict=True)]
        moved.append(np.hstack([torch.stack(pair).flatten(1).detach().numpy() for pair in steps]))
    record = finish(run)
    loss, accuracy, aligned = np.array(expected).T
    np.testing.assert_allclose(record.loss, loss, rtol=1e-4)
    np.testing.assert_allclose(record.accuracy, accuracy, atol=1 / 64)
    np.testing.assert_allclose(record.alignment, aligned, atol=0.005)
    ours, plain = np.hstack(moved)
    # A few elements differ: if a sign depends on rounding, only one of the two steps masks the element.
    assert np.isclose(ours, plain, rtol=1e-2, atol=1e-6).mean() > 0.99
    run.model.eval()
    with torch.no_grad():
        turned = torch.rot90(images.test, 1, (2, 3)).float()
        right = (run.model((turned - images.mean) / images.std).argmax(1) == images.test_labels).float().mean().item()
    assert record.test_accuracy[-1] == pytest.approx(right, abs=2 / 360)


def test_an_incomplete_last_batch_of_test_images_is_evaluated(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = finish(Run(task(continuous(3)), images)).test_accuracy
    monkeypatch.setattr(train, "TEST_BATCH", 100)
    assert np.array_equal(finish(Run(task(continuous(3)), images)).test_accuracy, whole)


def test_optimizers_get_the_same_data_and_weights(images: Images) -> None:
    records = [finish(Run(task(noisy(20), optimizer), images)) for optimizer in ("Adam", "CAdam", "CAdam")]
    assert records[0].loss[0] == records[1].loss[0]
    assert records[0].loss[-1] != records[1].loss[-1]
    for name in vars(records[1]):
        assert np.array_equal(getattr(records[1], name), getattr(records[2], name))


def test_bfloat16_is_near_float32(images: Images) -> None:
    full, half = (
        finish(Run(Task("small VGG", "CAdam", 1e-2, 0, CLEAN, 1, 64, precision=precision), images))
        for precision in ("float32", "bfloat16")
    )
    assert half.loss[0] == pytest.approx(full.loss[0], rel=1e-2)
    assert half.loss[0] != full.loss[0]
    assert half.test_accuracy[0] == pytest.approx(full.test_accuracy[0], abs=0.15)


# Comparison with a plain loop ------------------------------------------------------------------------------------


def three_channels() -> Images:
    """Return images with three different channels. The class of an image is the position of a bright pixel."""
    random = np.random.default_rng(0)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = random.integers(4, size=count)
        noise = random.random((count, 3, 8, 8)) * np.array([60, 120, 30]).reshape(3, 1, 1)
        noise[np.arange(count), :, labels % 2 * 4 + 1, labels // 2 * 4 + 1] += 90
        return noise.astype(np.uint8), labels

    return Images.of(some(300), some(240))


def rotate_and_normalize(batch: torch.Tensor, degrees: float, images: Images) -> torch.Tensor:
    """Rotate images counterclockwise with bilinear interpolation and black corners, and normalize each channel."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(batch), 2, 3)
    grid = F.affine_grid(matrix, list(batch.shape), align_corners=False)
    seen = F.grid_sample(batch.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    whole = images.train.double()
    channels = [(seen[:, c] - whole[:, c].mean()) / whole[:, c].std(correction=0) for c in range(3)]
    return torch.stack(channels, dim=1).float()


@pytest.mark.parametrize(("stream", "angle"), [("sudden 37", lambda step: 37 * (step // 9)), ("continuous 11", 11)])
def test_training_equals_a_loop_with_torch_adam(stream: str, angle: Callable[[int], float] | int) -> None:
    """The loop uses nothing of the trainer: torch's Adam with the paper's options, and its own image transformation."""
    images, steps, epochs = three_channels(), 300 // 32, 3
    config = Task("small VGG", "Adam", 3e-3, 5, parse(stream), epochs, batch=32, weight_decay=5e-4)
    record = finish(Run(config, images))
    order = CLEAN.schedule(5, 300, 4, 32, epochs).order
    model = models.build("small VGG", 3, 4, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=5e-4)
    loss, accuracy, tests = [], [], []
    for step, index in enumerate(torch.from_numpy(order)):
        degrees = angle * step if isinstance(angle, int) else angle(step)
        logits = model(rotate_and_normalize(images.train[index], degrees, images))
        batch_loss = F.cross_entropy(logits, images.train_labels[index])
        optimizer.zero_grad()
        batch_loss.backward()
        optimizer.step()
        loss.append(batch_loss.item())
        accuracy.append((logits.argmax(1) == images.train_labels[index]).float().mean().item())
        if (step + 1) % steps == 0:
            model.eval()
            with torch.no_grad():
                predicted = model(rotate_and_normalize(images.test, degrees, images)).argmax(1)
            tests.append((predicted == images.test_labels).float().mean().item())
            model.train()
    np.testing.assert_allclose(record.loss, loss, rtol=0, atol=2e-4)
    np.testing.assert_allclose(record.accuracy, accuracy, rtol=0, atol=1e-6)
    np.testing.assert_allclose(record.test_accuracy, tests, rtol=0, atol=1e-6)


# Concurrent runs --------------------------------------------------------------------------------------------------


class Timed:
    """A replacement of `Run` in which each call of `advance` takes a second."""

    def __init__(self, turns: int, clock: list[float]) -> None:
        self.turns, self.clock = turns, clock

    def advance(self) -> bool:
        self.clock[0] += 1
        self.turns -= 1
        return self.turns > 0

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass


def test_concurrent_runs_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    runs = [Timed(turns, clock) for turns in (2, 6, 3)]
    seconds = {runs.index(run): took for run, took in run_concurrently(runs, 2)}
    # Runs 0 and 1 alternate until run 0 ends, then runs 1 and 2, and the last second belongs to run 1 alone.
    assert seconds == pytest.approx({0: 2, 2: 3, 1: 6})
    assert sum(seconds.values()) == clock[0] == 11


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_concurrent_runs_equal_single_runs(images: Images, lanes: int) -> None:
    seeds = range(3)
    alone = {seed: finish(Run(task(seed=seed), images)) for seed in seeds}
    at_once, most = set(), 0

    def begin() -> Iterator[Run]:
        nonlocal most
        for seed in seeds:
            at_once.add(seed)
            most = max(most, len(at_once))
            yield Run(task(seed=seed), images)

    records = {}
    for run, seconds in run_concurrently(begin(), lanes):
        at_once.discard(run.task.seed)
        assert seconds > 0
        records[run.task.seed] = run.record()
        run.release()
    assert most == min(lanes, len(seeds))
    for seed in seeds:
        assert all(np.array_equal(getattr(records[seed], n), getattr(alone[seed], n)) for n in vars(alone[seed]))


CONFIG_FIRST, QUIESCE = "import torch._inductor.config; ", {"TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL": "1"}


@pytest.mark.parametrize(
    ("variables", "kept", "first"),
    [
        ({}, True, ""),
        ({}, True, CONFIG_FIRST),
        (QUIESCE, False, ""),
        pytest.param(QUIESCE, False, CONFIG_FIRST, marks=pytest.mark.slow),
    ],
)
def test_torch_keeps_the_processes_that_compile(variables: dict[str, str], kept: bool, first: str) -> None:
    """The environment variable has priority, and the order in which torch is imported does not matter."""
    code = f"{first}import cadam_paper.images.train, torch._inductor.config as c; print(c.quiesce_async_compile_pool)"
    others = {name: value for name, value in os.environ.items() if "QUIESCE" not in name}
    process = subprocess.run([sys.executable, "-c", code], env=others | variables, capture_output=True, text=True)
    if "quiesce_async_compile_pool does not exist" in process.stderr:
        pytest.skip("this torch always keeps them")
    assert process.stdout.strip() == str(not kept), process.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["CAdam", *CONTROL_ARMS])
def test_a_graph_gives_the_curve_of_eager_execution(images: Images, precision: train.Precision, optimizer: str) -> None:
    on_gpu = images.to(torch.device("cuda"))
    config = Task("small VGG", optimizer, 1e-3, 0, sudden(60) + noisy(20), 3, 64, precision=precision)
    plain, graph = (finish(Run(config, on_gpu, graph=graph)) for graph in (False, True))
    np.testing.assert_allclose(graph.loss, plain.loss, rtol=1e-3)
    np.testing.assert_allclose(graph.alignment, plain.alignment, atol=1e-2)
    np.testing.assert_allclose(graph.test_accuracy, plain.test_accuracy, atol=0.02)
