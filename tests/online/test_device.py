"""The device of a model: every command takes one, and a run may continue on another one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cadam.ab.comparison import compare
from cadam.ab.runner import StudyRunner
from cadam.cli import main
from cadam.cli.exit_codes import DONE, USAGE
from cadam.online import Learner, load_model, models
from cadam.online.data.schema import Schema
from cadam.online.device import select_device
from cadam.online.models.model_file import LOG_LOSS, OptimizerSpec, UsageError
from cadam.online.persistence.checkpoints import read_newest
from cadam.online.persistence.random_state import get_random_state, set_random_state
from cadam.online.run_config import MODEL_FILE, model_builder
from cadam.online.training_step import copy_columns
from tests.ab.helpers import ab_command, encode, make_study, write_clicks
from tests.online.data.test_sources import write_csv
from tests.online.streams import Replayed, table
from tests.online.test_training_step import SCHEMA, make_events, make_learner

OWN_MODEL = f"{Path(__file__).parent / 'model_file.py'}:build"
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    write_csv(tmp_path / "clicks.csv", table(600))
    return tmp_path / "clicks.csv"


def run_command(clicks: Path, *more: str) -> list[str]:
    state = ("--checkpoint", str(clicks.parent / "state"))
    return ["run", str(clicks), "--label", "click", "--batch-size", "50", "--quiet", *state, *more]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    saved: dict[str, torch.Tensor] = read_newest(folder)[1]["model"]
    return saved


# Without a CUDA device -----------------------------------------------------------------------------------------


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_each_command_says_that_there_is_no_cuda_device(
    device: str, clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_clicks(clicks.parent)
    assert main.main(run_command(clicks)) == DONE
    export = ["export", str(clicks.parent / "state"), str(clicks.parent / "model.pt2")]
    for arguments in (run_command(clicks), ab_command(clicks.parent), export):
        capsys.readouterr()
        assert main.main([*arguments, "--device", device]) == USAGE
        message = capsys.readouterr().err
        assert f"--device {device}" in message
        assert "--device cpu" in message


@pytest.mark.usefixtures("no_cuda")
def test_auto_is_the_cpu_if_there_is_no_cuda_device() -> None:
    assert select_device("auto") == torch.device("cpu")
    assert select_device(None) is None


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps", "meta"])
def test_other_devices_are_refused(device: str, clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main.main(run_command(clicks, "--device", device))
    assert error.value.code == USAGE
    assert "--device" in capsys.readouterr().err


def test_a_number_beyond_the_last_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="cuda:1"):
        select_device("cuda:2")


def test_models_are_built_on_the_device() -> None:
    schema = Schema({"user": "category:50", "item": "category:20", "price": "number"}, label="click")
    for model in (*models.MODELS, OWN_MODEL):
        built = model_builder(model, schema, {}, torch.device("meta"))[0]()
        assert {tensor.device.type for tensor in (*built.parameters(), *built.buffers())} == {"meta"}


def test_the_device_is_not_part_of_what_a_run_saves(clicks: Path) -> None:
    assert main.main(run_command(clicks, "--device", "cpu", "--events", "300")) == DONE
    assert "device" not in json.loads((clicks.parent / "state" / MODEL_FILE).read_text())
    assert main.main(run_command(clicks)) == DONE
    half_and_half = weights(clicks.parent / "state")
    assert main.main([*run_command(clicks), "--checkpoint", str(clicks.parent / "whole")]) == DONE
    for name, value in weights(clicks.parent / "whole").items():
        assert torch.equal(value, half_and_half[name])


def test_columns_are_copied_to_a_device_with_their_types_and_shapes() -> None:
    columns = make_events(5).features
    columns["tags"] = np.asfortranarray(columns["tags"])
    columns["price"].flags.writeable = False
    for given in (columns, {name: values[:0] for name, values in columns.items()}):
        copied = copy_columns(given, torch.device("cpu"))
        assert list(copied) == list(given)
        for name, values in given.items():
            np.testing.assert_array_equal(copied[name].numpy(), values)
            assert copied[name].numpy().dtype == values.dtype


def test_random_states_of_more_devices_than_there_are_now_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["first", "second"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((state, device)))
    set_random_state(get_random_state())
    assert restored == [("first", 0)]


# With a CUDA device --------------------------------------------------------------------------------------------


def learner_on(device: str, model: str = "deepfm", **options: Any) -> Learner:
    torch.manual_seed(0)
    built = model_builder(model, SCHEMA, {}, torch.device(device))[0]()
    return Learner(built, OptimizerSpec.parse("CAdam").build(built, 0.01), LOG_LOSS, **options)


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("model", models.MODELS)
def test_a_model_on_cuda_gives_the_scores_of_the_cpu(model: str) -> None:
    cpu, cuda = learner_on("cpu", model), learner_on("cuda", model)
    for seed in range(8):
        batch = make_events(64 if seed < 7 else 9, seed)
        np.testing.assert_allclose(cuda.learn(batch), cpu.learn(batch), rtol=1e-3, atol=1e-4)
    assert cuda.training.has_single_pass
    assert cuda.learned == cpu.learned


@pytest.mark.cuda
@on_cuda
def test_one_pass_on_cuda_gives_the_scores_of_two() -> None:
    one, two = learner_on("cuda"), learner_on("cuda")
    two.training.has_single_pass = False
    for seed in range(8):
        batch = make_events(64, seed)
        if seed == 5:
            batch.features["price"][3] = np.inf
        np.testing.assert_allclose(one.learn(batch), two.learn(batch), rtol=1e-4, atol=1e-5)
    assert one.rejected == two.rejected == 1


@pytest.mark.cuda
@on_cuda
def test_per_event_training_on_cuda_uses_torch() -> None:
    assert "cuda" in learner_on("cuda", "fm", per_event=True).training_mode


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("order", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda:0", "cuda")])
def test_a_run_continues_on_another_device(order: tuple[str, str], tmp_path: Path) -> None:
    batches = [make_events(32, seed) for seed in range(8)]
    whole = make_learner(single_pass=True)
    whole.run(Replayed(copy.deepcopy(batches)))
    for device, limit in zip(order, (128, None), strict=True):
        part = learner_on(device, checkpoint=tmp_path)
        part.run(Replayed(batches), events=limit)
        part.close()
        on = torch.device(device).type
        state = [v for s in part.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.numel() > 1]
        assert {tensor.device.type for tensor in (*part.model.state_dict().values(), *state)} == {on}
    assert part.resumed
    assert part.metrics()["log_loss"] == pytest.approx(whole.metrics()["log_loss"], rel=1e-3)
    warm = learner_on(order[0])
    warm.warm_start(sorted(tmp_path.glob("checkpoint-*"))[-1])
    for name, value in warm.model.state_dict().items():
        assert torch.equal(value.cpu(), part.model.state_dict()[name].cpu())


@pytest.mark.cuda
@on_cuda
def test_the_commands_run_on_cuda(clicks: Path) -> None:
    folder = clicks.parent
    assert main.main(run_command(clicks, "--device", "cuda", "--events", "300")) == DONE
    assert main.main(run_command(clicks, "--device", "auto")) == DONE
    records = [{"user": 3, "item": 4, "price": 0.5}, {"user": 1, "item": 2, "price": 1.5}]
    expected = load_model(folder / "state").predict(records)
    np.testing.assert_allclose(load_model(folder / "state", device="cuda").predict(records), expected, rtol=1e-4)
    encoded = load_model(folder / "state").encode(records).events
    assert encoded is not None
    for device in ("cpu", "cuda"):
        exported = folder / f"{device}.pt2"
        assert main.main(["export", str(folder / "state"), str(exported), "--device", device]) == DONE
        features = {name: torch.from_numpy(values).to(device) for name, values in encoded.features.items()}
        scores = torch.export.load(exported).module()(features)
        np.testing.assert_allclose(scores.detach().cpu().numpy(), expected, rtol=1e-4)
        assert {v.device.type for v in torch.load(exported.with_suffix(".pt")).values()} == {"cpu"}


@pytest.mark.cuda
@on_cuda
def test_an_arm_on_cuda_measures_what_it_measures_on_the_cpu(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    losses = []
    for settings in ({}, {"device": "cuda"}):
        study = make_study(tmp_path, settings=settings, grid=(0.03,), seeds=1)
        stream, cache = encode(tmp_path, study)
        analysis = compare(study, stream, StudyRunner(study, cache))
        losses.append(analysis.result().arms[0].metrics["log_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
