"""Rejected events are counted by reason and reported with advice, and too many of them end a run."""

from __future__ import annotations

import io
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cadam.cli import main
from cadam.online import Batch, Console, Labels, Learner, Rejected, Schema
from cadam.online.metrics.log_loss import LogLoss
from cadam.online.monitoring import reject_limit
from cadam.online.monitoring.baseline_check import BaselineCheck
from cadam.online.monitoring.console import ProgressBar
from cadam.online.monitoring.reject_limit import RejectLimit
from cadam.online.monitoring.rejection_reasons import format_reasons, generalize_reason, suggest_fix
from tests.online.data.test_sources import write_csv
from tests.online.redis_server import Server
from tests.online.streams import Replayed, build, events, learner


def clicks(path: Path, count: int, **change: Any) -> Path:
    random = np.random.default_rng(0)
    item = random.integers(0, 40, count)
    columns = {
        "user": random.integers(0, 50, count),
        "item": item,
        "device": np.array(["ios", "android"])[item % 2],
        "click": (item % 4 == 0).astype(np.int64),
    }
    write_csv(path, {**columns, **change})
    return path


def run(*arguments: Any) -> int:
    return main.main(["run", *map(str, arguments)])


def schema_file(path: Path, **features: str) -> Path:
    given = {"user": "hash:1000", "item": "hash:1000", **features}
    path.write_text(json.dumps({"features": given, "label": "click"}))
    return path


def test_run_needs_only_a_file_and_the_name_of_the_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = clicks(tmp_path / "clicks.csv", 3000).read_text().splitlines(keepends=True)
    (tmp_path / "clicks.csv").write_text("".join(lines[:2001]))
    assert run("clicks.csv", "--label", "click") == 0
    told = capsys.readouterr()
    assert "integer ids" in told.out
    assert "the stream has ended at 2,000 events; the checkpoint is in runs/clicks" in told.err
    assert json.loads((tmp_path / "runs/clicks/model.json").read_text()) == {"model": "deepfm"}
    schema = Schema.read(tmp_path / "runs/clicks/schema.json")
    assert set(schema.features) == {"user", "item", "device"}
    (tmp_path / "clicks.csv").write_text("".join(lines))
    assert run("clicks.csv", "--label", "click") == 0
    told = capsys.readouterr()
    assert "the schema is runs/clicks/schema.json" in told.err
    assert "3,000 events" in told.err
    assert run("clicks.csv", "--label", "device==ios") == 2
    error = capsys.readouterr().err
    assert "schema.json contradicts the command: --label is device==ios" in error
    assert run("clicks.csv", "--label", "click", "--id", "item", "--ignore", "device") == 2
    error = capsys.readouterr().err
    assert "--id is item" in error
    assert "--ignore has device" in error


def test_the_same_command_resumes_if_users_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clicks(tmp_path / "clicks.csv", 1000, user=np.array([f"u{i % 9}" for i in range(1000)]))
    for _ in range(2):
        assert run("clicks.csv", "--label", "click", "--user", "user") == 0
    assert Schema.read("runs/clicks/schema.json").user == "user:text"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("command", ["schema", "run", "ab"])
def test_every_command_rejects_two_columns_with_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names, rows = ["user", "item", "item", "click"], [(i % 7, i % 5, 1, i % 3 % 2) for i in range(500)]
    if kind == "csv":
        Path("two.csv").write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)))
    else:
        pa = pytest.importorskip("pyarrow")
        columns = [pa.array(column) for column in zip(*rows, strict=True)]
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_arrays(columns, names=names), "two.parquet")
    assert main.main([command, f"two.{kind}", "--label", "click"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"cadam {command}: two.{kind} has more than one column 'item'")
    assert not Path("schema.json").exists()
    if command == "schema" and kind == "csv":
        assert main.main([command, f"two.{kind}", "--label", "click", "--ignore", "item"]) == 0


def test_a_schema_that_was_edited_is_replaced_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    clicks(tmp_path / "clicks.csv", 1000)
    command = ["schema", "clicks.csv", "--label", "click"]
    assert main.main(command) == 0
    inferred = Path("schema.json").read_text()
    assert main.main(command) == 0, "the same again"
    edited = inferred.replace("hash:", "hash:1")
    Path("schema.json").write_text(edited)
    assert main.main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("cadam schema: schema.json exists and differs from the inferred schema")
    assert "--output" in error
    assert "--force" in error
    assert Path("schema.json").read_text() == edited != inferred
    assert main.main([*command, "--force"]) == 0
    assert Path("schema.json").read_text() == inferred


@pytest.mark.parametrize(
    ("model", "option", "message"),
    [
        ("fm", ("--hidden", "64,32"), "--hidden is for models with hidden layers (deepfm, dcn, mlp), and fm has none"),
        ("linear", ("--hidden", "64"), "--hidden is for models with hidden layers (deepfm, dcn, mlp), and linear has"),
        ("linear", ("--width", 64), "--width is for models with embeddings (fm, deepfm, dcn, mlp), and linear"),
    ],
)
def test_width_and_hidden_are_rejected_for_models_without_these_parts(
    model: str, option: tuple[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, state = clicks(tmp_path / "clicks.csv", 1000), tmp_path / "state"
    same = (data, "--label", "click", "--checkpoint", state)
    assert run(*same, "--model", model, *option) == 2
    assert message in capsys.readouterr().err
    assert run(*same, "--model", model) == 0
    assert run(*same, *option) == 2, "the model is that of the folder"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["schema.json", "model.json"])
def test_a_failed_write_leaves_the_files_of_the_folder_intact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, state = clicks(tmp_path / "clicks.csv", 1000), tmp_path / "state"
    same = (data, "--label", "click", "--checkpoint", state)
    assert run(*same, "--events", 500) == 0
    before = (state / name).read_bytes()

    def full(path: Path, content: bytes) -> int:
        with open(path, "wb") as file:
            if name.removesuffix(".json") in path.name:
                raise OSError("no space left")
            return file.write(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", lambda path, text, *_, **__: full(path, text.encode()))
    assert run(*same) != 0
    assert (state / name).read_bytes() == before
    assert not list(state.glob(".*.new"))


@pytest.mark.parametrize("content", ["", '{"model": "fm"', '["fm"]', "{}", "null"])
def test_a_damaged_model_file_is_reported_with_advice(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, state = clicks(tmp_path / "clicks.csv", 1000), tmp_path / "state"
    same = (data, "--label", "click", "--checkpoint", state)
    assert run(*same, "--model", "fm", "--events", 500) == 0
    good = (state / "model.json").read_bytes()
    (state / "model.json").write_text(content)
    cure = f"{state / 'model.json'} is damaged"
    for command in (lambda: run(*same), lambda: main.main(["export", str(state), str(tmp_path / "model.pt2")])):
        capsys.readouterr()
        assert command() == 2
        assert cure in capsys.readouterr().err
    assert run(*same, "--model", "deepfm") == 2, "another model than that of the state"
    assert "does not fit this command" in capsys.readouterr().err
    assert run(*same, "--model", "fm") == 0
    assert (state / "model.json").read_bytes() == good


def test_a_schema_behind_a_symlink_is_replaced_at_its_target(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "schema.json").symlink_to(tmp_path / "there" / "schema.json")
    for kind in ("number", "hash:10"):
        Schema({"x": kind}).write(tmp_path / "schema.json")
        assert (tmp_path / "schema.json").is_symlink()
        assert Schema.read(tmp_path / "there" / "schema.json").features == {"x": kind}
    Schema({"x": "number"}).write("/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_rejected_command_does_not_change_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, state = clicks(tmp_path / "clicks.csv", 1000), tmp_path / "state"
    other = schema_file(tmp_path / "other.json", item="hash:50")
    same = (data, "--label", "click", "--checkpoint", state)
    assert run(*same) == 0
    before = {name: (state / name).read_text() for name in ("model.json", "schema.json")}
    item = Schema.read(state / "schema.json").features["item"]
    for change, message in (
        (("--model", "mlp"), "deepfm with width 8; you gave mlp with width 8"),
        (("--width", 16), "deepfm with width 8; you gave deepfm with width 16"),
        (("--hidden", "7,5"), "you gave deepfm with width 8 and hidden layers 7,5"),
        (("--schema", other), f"item was {item} and is hash:50"),
    ):
        capsys.readouterr()
        assert run(*same, *change) == 2
        assert message in capsys.readouterr().err
        assert {name: (state / name).read_text() for name in before} == before
    assert run(*same) == 0
    assert main.main(["export", str(state), str(tmp_path / "model.pt2")]) == 0


def test_unknown_optimizers_and_metrics_are_reported_before_the_data_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = clicks(tmp_path / "clicks.csv", 100)
    for option, name in (("--optimizer", "adamm"), ("--metrics", "aucc")):
        assert run(data, "--label", "click", "--checkpoint", tmp_path / "state", option, name) == 2
        told = capsys.readouterr()
        assert name in told.err
        assert "column" not in told.out
        assert not (tmp_path / "state").exists()


def test_a_category_that_is_too_small_fails_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = clicks(tmp_path / "clicks.csv", 2000)
    schema = schema_file(tmp_path / "schema.json", item="category:22")
    assert run(data, "--schema", schema, "--checkpoint", tmp_path / "state") == 1
    told = capsys.readouterr().err
    assert "rejected (4" in told
    assert "x item: ... is not from 0 to 21" in told
    assert "what to do: column 'item' has values beyond category:22: write hash:88 in the schema" in told
    assert run(data, "--schema", schema, "--checkpoint", tmp_path / "b", "--max-rejected", "50%") == 0


def test_after_too_many_rejected_events_the_message_explains_how_to_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = np.array(["large" if row % 20 == 0 else str(row % 7) for row in range(2000)], dtype=object)
    data, state = clicks(tmp_path / "clicks.csv", 2000, size=sizes), tmp_path / "state"
    schema = schema_file(tmp_path / "schema.json", size="number?")
    assert run(data, "--schema", schema, "--checkpoint", state) == 1
    told = capsys.readouterr().err
    assert "write hash:1000? in the schema" in told
    assert f"the schema is {schema}" in told
    assert f"remove the checkpoints (rm {state}/checkpoint-*)" in told
    schema_file(schema, size="hash:1000?")
    for path in state.glob("checkpoint-*"):
        path.unlink()
    assert run(data, "--schema", schema, "--checkpoint", state) == 0
    assert "ended at 2,000 events;" in capsys.readouterr().err


def test_events_without_a_label_are_reported_in_the_table_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = np.array(["" if row % 10 == 0 else str(row % 40) for row in range(2000)], dtype=object)
    data = clicks(tmp_path / "clicks.csv", 2000, price=prices)
    assert run(data, "--label", "price>20", "--checkpoint", tmp_path / "state") == 0
    told = capsys.readouterr()
    shown = " ".join(told.out.split())
    assert "10.0% missing (200 of 2,000 labels)" in shown
    assert "200 had no label and were not learned from" in told.err
    assert "wait for a label" not in told.err


def test_a_run_stops_if_most_of_the_first_events_are_rejected_and_can_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reject_limit, "EVENTS_PER_CHECK", 1000)
    data = clicks(tmp_path / "clicks.csv", 3000)
    schema = schema_file(tmp_path / "schema.json", item="category:5")
    arguments = (data, "--schema", schema, "--checkpoint", tmp_path / "state", "--model", "linear")
    assert run(*arguments) == 1
    told = capsys.readouterr().err
    assert "stopped: " in told
    assert "no checkpoint was kept" in told
    assert int(told.partition(" events were rejected")[0].rpartition(" of ")[2].replace(",", "")) < 1500
    schema_file(schema)
    assert run(*arguments) == 0
    assert "ended at 3,000 events" in capsys.readouterr().err


def source(count: int, rejected: int) -> Replayed:
    """Batches of 20 events, each with `rejected` rejected ones."""
    bad = [Rejected("item: 7 is not from 0 to 5", "here", "", 0)] * rejected
    return Replayed([Batch(events(20, seed=n % 7, first=20 * n), rejected=bad) for n in range(count)])


def test_a_followed_stream_stops_only_with_a_limit_and_can_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reject_limit, "EVENTS_PER_CHECK", 1000)
    stream = source(120, 1)
    warned = RejectLimit(None, follow=True)
    ours = learner(reports=[warned])
    with caplog.at_level(logging.WARNING):
        ours.run(stream)
    assert not ours.stopped
    assert "item: ... is not from 0 to 5" in caplog.text
    assert ours.metrics()["rejected_share"] == pytest.approx(1 / 21)
    told = []
    for _ in range(2):
        watch = RejectLimit(0.01, follow=True)
        ours = learner(reports=[watch], checkpoint=tmp_path)
        ours.run(stream if ours.resumed else source(120, 1))
        told.append((ours.events, watch.stop_reason))
        ours.close()
    assert told[0][0] < told[1][0]
    assert all(why for _, why in told)
    assert ours.rejections.reasons.total() == ours.rejected == ours.events // 20


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("item: ... is not from 0 to 9", "write hash:40 in the schema"),
        ("missing field 'price'", "write number? in the schema"),
        ("missing field 'user'", "the user is missing in some events, in column 'user': give another --user, or none"),
        ("missing field 'when'", "give another --time, or none"),
        ("missing field 'shop'", "write category:10? in the schema"),
        ("missing field 'click'", "leave it out of the schema"),
        ("price: text '...' is not a number", "write hash:1000 in the schema"),
        ("size: text '...' is not a number", "write hash:1000? in the schema"),
        ("shop: 7 is not from 0 to 9", "write hash:40? in the schema"),
        ("not readable: not UTF-8", "iconv -f latin1 -t utf8"),
        ("not readable: ... fields, not 5", "separator"),
        ("when: '...' is not a time of the format iso", "--time 'when:%d/%m/%Y"),
        ("something else", "cadam schema"),
    ],
)
def test_the_suggested_fix_is_that_of_the_most_frequent_reason(reason: str, words: str) -> None:
    features = {"item": "category:10", "price": "number", "size": "number?", "shop": "category:10?"}
    schema = Schema(features, label="click", user="user", time="when:iso")
    assert words in suggest_fix({"another": 3, reason: 5}, schema)
    assert format_reasons({"a": 1, "b": 3, "c": 2, "d": 5}, 2) == "5 x d; 3 x b and 2 more reasons"


def test_reasons_that_differ_only_in_a_value_are_counted_together() -> None:
    reason = generalize_reason("device: text 'b c' is not a number")
    assert generalize_reason("item: 7 is not from 0 to 5") == generalize_reason("item: -12 is not from 0 to 5")
    assert generalize_reason("device: text 'a' is not a number") == reason
    assert generalize_reason('device: text "a\'s" is not a number') == reason
    assert generalize_reason("missing field 'a'") != generalize_reason("missing field 'b'")
    assert generalize_reason("item: 7 is not from 0 to 5") != generalize_reason("item: 7 is not from 0 to 6")


@pytest.mark.parametrize(
    ("rate", "noise", "words"),
    # Without label noise the model can learn the few items at any rate, and rounding decides whether it does at 30.
    [(1e-5, 0.0, "Try a higher --lr"), (0.01, 0.0, ""), (30.0, 0.3, "Try a lower --lr")],
)
def test_a_model_that_is_no_better_than_a_constant_is_reported_with_advice(
    rate: float, noise: float, words: str
) -> None:
    check, model, random = BaselineCheck(), build(), np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)  # like a model whose outputs begin near 0
    ours = learner(model, reports=[check])
    for group in ours.optimizer.param_groups:
        group["lr"] = rate
    batches = [events(20, seed=n % 5, first=20 * n) for n in range(300)]
    for batch in batches:
        assert batch.labels is not None
        flipped = random.random(len(batch.labels)) < noise
        batch.labels[flipped] = 1 - batch.labels[flipped]
    ours.run(Replayed(batches))
    assert words in check.warning(ours)
    assert bool(words) == bool(check.warning(ours))


def test_unpredictable_labels_are_not_blamed_on_the_learning_rate() -> None:
    check = BaselineCheck()
    check._first_half = LogLoss(2000, 500, 1125.0, 500, weight=2000)
    late = LogLoss(2000, 500, 1126.0, 500, weight=2000)
    assert "features may not contain" in check._rate_advice(late)


def useless_learner(batch_size: int, **options: Any) -> Learner:
    """A learner that hardly moves, so that it is no better than a constant."""
    ours = learner(batch_size=batch_size, **options)
    for group in ours.optimizer.param_groups:
        group["lr"] = 1e-5
    return ours


def test_the_learning_rate_is_not_blamed_after_few_steps() -> None:
    check = BaselineCheck()
    ours = useless_learner(100, reports=[check])
    ours.run(Replayed([events(100, seed=n % 5, first=100 * n) for n in range(60)]))
    warning = check.warning(ours)
    assert "60 steps" in warning
    assert "--lr" not in warning


def test_the_learning_rate_is_not_blamed_if_labels_are_late() -> None:
    check = BaselineCheck()
    ours = useless_learner(10, reports=[check])
    batches = [events(100, seed=n % 5, first=100 * n) for n in range(60)]
    unlabeled = [replace(one, labels=None) for one in batches]
    labels = [Labels(one.ids, one.labels) for one in batches if one.ids is not None and one.labels is not None]
    ours.run(Replayed([*unlabeled, *labels]))
    warning = check.warning(ours)
    assert "up to 6,000 events waited" in warning
    assert "--lr" not in warning


def test_the_learning_rate_is_not_blamed_if_columns_were_left_out() -> None:
    check = BaselineCheck(["title", "comment"])
    ours = useless_learner(20, reports=[check])
    ours.run(Replayed([events(20, seed=n % 5, first=20 * n) for n in range(300)]))
    warning = check.warning(ours)
    assert "title, comment" in warning
    assert "--lr" not in warning


def test_the_left_out_columns_are_known_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{n % 7},always,{n % 2}" for n in range(300)]
    Path("clicks.csv").write_text("\n".join(["user,nothing,click", *lines]), encoding="utf-8")
    for count in (100, 200):
        assert main.main(["run", "clicks.csv", "--label", "click", "--events", str(count), "--quiet"]) == 0
        assert "nothing" in json.loads(Path("runs/clicks/schema.json").read_text("utf-8"))["ignored"]


def test_a_mistyped_redis_stream_is_reported_with_a_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(tmp_path)
    try:
        for row in range(300):
            server.client.xadd("clicks", {"user": str(row % 9), "item": str(row % 7), "click": str(int(row % 7 == 0))})
        uri = server.url.replace("/0", "")
        assert main.main(["schema", f"{uri}/klicks", "--label", "click", "--output", str(tmp_path / "s.json")]) == 2
        assert "no stream 'klicks'; did you mean clicks?" in capsys.readouterr().err
        schema = ("--schema", schema_file(tmp_path / "schema.json"))
        assert run(f"{uri}/klicks", *schema, "--checkpoint", tmp_path / "state") == 2
        assert "no stream 'klicks'; did you mean clicks?" in capsys.readouterr().err
        assert run(f"{uri}/clicks", "--label", "click", "--checkpoint", tmp_path / "state") == 0
        assert "ended at 300 events" in capsys.readouterr().err
    finally:
        server.stop()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressBar, "SECONDS_BETWEEN_UPDATES", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()

    class QuarterRead(Replayed):
        share = 0.25

    batches = QuarterRead([events(20, seed=n, first=20 * n) for n in range(50)])
    learner(reports=[Console(out)]).run(batches)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert re.search(r"25% +1,000 events", shown)
    plain = io.StringIO()
    batches.position = 0
    learner(reports=[Console(plain)]).run(batches)
    assert "%" not in plain.getvalue()


def test_a_line_is_printed_after_some_seconds_even_if_events_have_not_doubled() -> None:
    out = io.StringIO()
    learner(reports=[Console(out, seconds=0.0)]).run(Replayed([events(20, seed=n, first=20 * n) for n in range(9)]))
    lines = [line.split()[0] for line in out.getvalue().splitlines() if line and line.split()[0].isdigit()]
    assert lines[:9] == [str(20 * n) for n in range(1, 10)]
