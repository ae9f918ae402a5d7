"""`cadam ab` from end to end."""

from __future__ import annotations

import argparse
import errno
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.ab import runner
from cadam.ab.runner import RunFiles
from cadam.ab.study import Study
from cadam.ab.wording import ACTIONS
from cadam.cli import ab
from cadam.cli.ab import digest_data, learning_command
from cadam.cli.ab_arguments import add_arguments
from cadam.cli.exit_codes import FAILED
from cadam.cli.main import main
from tests.ab.helpers import EVENTS, MODEL, USERS, ab_command, make_result


def verdict(output: str) -> dict[str, Any]:
    """Return the only verdict of a JSON output."""
    (found,) = json.loads(output)["verdicts"]
    return dict(found)


@pytest.mark.parametrize("more", [[], ["--seeds", "1"]])
def test_arms_that_compute_the_same_make_no_practical_difference(
    more: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ab_command(folder, "--arms", "cadam,cadam:track_alignment=False", "--lr", "0.03", "--json", *more)) == 0
    found = verdict(capsys.readouterr().out)
    assert found["action"] == "no practical difference"
    assert "make the same predictions, to the last bit" in found["headline"]


def test_the_command_compares_continues_and_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ab_command(folder, "--arms", "sgdm,adam", "--lr", "0.003,0.03", "--change", "item", "--events", "2000")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    answer = printed.split("\n\n")[-2].splitlines()[0]
    assert re.match("Switch|Stay|Undecided|No practical difference", answer), "the answer begins the result"
    page = (folder / "report.html").read_text()
    assert "cadam ab --data" in re.sub("<.*?>", "", page)
    assert "<svg" in page
    scores = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("scores.f32")}
    assert len(scores) >= 2 * 2 * 2
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["title"] == f"Adam against SGDM on {folder / 'clicks.parquet'}"
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("scores.f32")} == scores
    again = json.loads((folder / "report.json").read_text())
    assert {**numbers, "seconds": 0} == {**again, "seconds": 0}
    (folder / "model.py").write_text(MODEL.replace("4, sparse", "5, sparse"))
    assert main(arguments) == 2, "the report is that of another model"
    for made in ("report.html", "report.json"):
        (folder / made).unlink()
    assert main(arguments) == 0
    assert len(list((folder / "runs").rglob("scores.f32"))) >= 2 * len(scores)


@pytest.mark.parametrize("metric", ["auc", "gauc"])
def test_another_metric_decides_in_blocks(folder: Path, capsys: pytest.CaptureFixture[str], metric: str) -> None:
    assert main(ab_command(folder, "--metric", metric, "--lr", "0.03", "--json", "--blocks", "24")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == metric
    assert found["pairs"][0]["over_time"]["count"] == 24
    assert f"the {metric.upper()} with CAdam is" in found["verdicts"][0]["headline"]


def test_a_clear_difference_stops_early_and_full_continues(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadam.ab.study.FIRST_SEGMENT", 2000)
    monkeypatch.setattr("cadam.ab.study.SEGMENT_GROWTH", 1.1)
    arguments = ab_command(
        folder, "--arms", "sgdm,adam", "--lr", "0.01", "--json", "--seeds", "4", "--batch-size", "10"
    )
    assert main(arguments) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert verdict(json.dumps(stopped))["action"] == "switch"
    assert stopped["recommended"] == "Adam"
    assert stopped["processed_events"] < 3000
    assert main([*arguments, "--full"]) == 0
    full = json.loads(capsys.readouterr().out)
    assert full["processed_events"] == 3000
    assert full["pairs"][0]["first_decided_at"] == stopped["pairs"][0]["first_decided_at"]


def test_each_comparison_has_its_own_folder_and_replaces_no_other_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    arguments = ab_command(folder, "--lr", "0.03", "--events", "1500")
    given = arguments.index("--output")
    del arguments[given : given + 2]
    for more in ([], [], ["--seeds", "3"]):  # the second command repeats the first
        assert main([*arguments, *more]) == 0
    folders = sorted((folder / "ab").iterdir())
    assert [folder.name[:7] for folder in folders] == ["clicks-", "clicks-"]
    made = {"report.html", "report.json", "report.schema.json"}
    assert all({path.name for path in folder.iterdir()} == made for folder in folders)
    capsys.readouterr()
    (folder / "mine.html").write_text("mine")
    assert main([*arguments, "--output", "mine.html"]) == 2
    assert "mine.html exists and is not a report of this comparison" in capsys.readouterr().err
    assert (folder / "mine.html").read_text() == "mine"


@pytest.mark.parametrize("name", ["mine.html", "mine.json", "mine.schema.json"])
def test_no_file_of_the_report_replaces_a_file_of_the_user(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (folder / name).write_text('{"mine": 1}')
    assert main(ab_command(folder, "--output", str(folder / "mine.html"))) == 2
    assert f"{folder / name} exists and is not a report of this comparison" in capsys.readouterr().err
    assert (folder / name).read_text() == '{"mine": 1}'
    assert not (folder / "runs").exists(), "refused before any work"


def test_a_report_never_replaces_its_own_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pq.read_table(folder / "clicks.parquet").to_pylist()
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "clicks.json").write_text(content)
    arguments = ["--data", f"jsonl:{folder / 'clicks.json'}", "--output", str(folder / "clicks.html")]
    assert main(ab_command(folder, *arguments)) == 2
    assert "clicks.json is the data, and would be replaced" in capsys.readouterr().err
    assert (folder / "clicks.json").read_text() == content


@pytest.mark.parametrize("name", ["z.json", "z", "z.schema.json", ".html"])
def test_a_report_must_be_an_html_file(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(ab_command(folder, "--output", str(folder / name))) == 2
    assert "its name must end in .html" in capsys.readouterr().err
    assert not (folder / name).exists()


def test_scores_of_a_stream_that_is_not_in_files_belong_to_its_content(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cadam.cli.ab._data_files", lambda _: [])  # as of a stream in Redis
    arguments = ab_command(folder, "--lr", "0.03", "--seeds", "1", "--json")

    def arms(*more: str) -> Any:
        assert main([*arguments, *more]) == 0
        return json.loads(capsys.readouterr().out)["arms"]

    assert arms() == arms()
    events = pq.read_table(folder / "clicks.parquet")
    pq.write_table(events.slice(500), folder / "clicks.parquet")  # the oldest events were removed
    assert arms() == arms("--cache", str(folder / "empty"))


def test_a_renamed_partition_is_other_data(tmp_path: Path) -> None:
    for name, text in (("country=DE/a.parquet", "1"), ("country=FR/a.parquet", "2")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    before = digest_data(f"parquet:{tmp_path}")
    assert digest_data(f"parquet:{tmp_path}") == before
    (tmp_path / "country=DE").rename(tmp_path / "country=AT")
    assert digest_data(f"parquet:{tmp_path}") != before, "the folder is a column, and the content is the same"


def test_a_given_schema_beside_the_report_is_not_changed(folder: Path) -> None:
    given = {**json.loads((folder / "schema.json").read_text()), "ignored": {"x": "why"}}
    (folder / "report.schema.json").write_text(json.dumps(given))
    arguments = ab_command(folder, "--schema", str(folder / "report.schema.json"), "--lr", "0.03", "--events", "1500")
    assert main(arguments) == 0
    assert json.loads((folder / "report.schema.json").read_text()) == given


@pytest.mark.parametrize("jobs", [1, 2])
def test_text_that_a_model_prints_is_not_part_of_the_json(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(runner, "MIN_SECONDS_FOR_WORKERS", 1e9 if jobs == 1 else 0.0)
    (folder / "model.py").write_text(MODEL.replace("super().__init__()", "super().__init__(); print('building')"))
    assert main([*ab_command(folder, "--lr", "0.03", "--events", "1500"), "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["complete"]
    assert "building" in printed.err


def test_json_is_all_that_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ab_command(folder, "--lr", "0.03", "--events", "1500"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((folder / "report.json").read_text())
    (pair,) = printed["pairs"]
    assert ACTIONS[pair["kind"]] == printed["verdicts"][0]["action"]
    assert (pair["arm"], pair["baseline"]) == ("CAdam", "Adam")
    assert pair["difference"] == pair["over_time"]["mean"]


def test_a_learning_rate_that_is_given_twice_counts_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ab_command(folder, "--lr", "0.03,0.030,0.03", "--events", "1500")) == 0
    assert "run at 1 learning rate under 2 seeds (4 runs)" in capsys.readouterr().out


def test_the_output_ends_with_the_command_that_learns_with_the_recommended_arm(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    rows = pq.read_table("clicks.parquet").to_pylist()
    Path("clicks.csv").write_text(
        "\n".join(["user,item,click", *(f"{r['user']},{r['item']},{r['click']:g}" for r in rows)])
    )
    arguments = ["ab", "clicks.csv", "--label", "click", "--batch-size", "50", "--seeds", "1"]
    assert main([*arguments, "--lr", "0.03", "--output", "report.html", "--cache", "runs"]) == 0
    command = (
        "cadam run clicks.csv --label click --batch-size 50 --optimizer Adam --lr 0.03 --checkpoint runs/clicks-ab"
    )
    printed = capsys.readouterr().out
    assert json.loads(Path("report.json").read_text())["run"] == command, "one seed decides nothing: the baseline stays"
    assert printed.endswith(f"to learn with Adam from now on:\n  {command}\n")
    assert main([*command.split()[1:], "--quiet"]) == 0
    assert main([*arguments, "--lr", "0.03", "--output", "report.html", "--cache", "runs"]) == 0
    assert json.loads(Path("report.json").read_text())["run"] == f"{command}-2"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arms", "adam"], "two or more optimizers, got 'adam'"),
        (["--arms", "adam,adan"], "no optimizer 'adan'; there are"),
        (["--arms", "adam,cadam,adamw,cadamw,lion,clion,sgdm,csgdm,radam"], "--arms takes up to 8 optimizers, got 9"),
        (["--arms", "adam,cadam:moments=int4"], "cadam:moments=int4: Invalid moments value: 'int4'"),
        (["--arms", "cadam:eps=1:amsgrad=True,cadam:amsgrad=True:eps=1"], "has CAdam:amsgrad=True:eps=1.0 more than"),
        (["--arms", "adam,,cadam"], "no optimizer ''; there are"),
        (["--lr", "0.1,-1"], "--lr: learning rates must be above 0 and finite, got '-1'"),
        (["--lr", "inf,0.01"], "--lr: learning rates must be above 0 and finite, got 'inf'"),
        (["--lr", "nan"], "--lr: learning rates must be above 0 and finite, got 'nan'"),
        (["--change", "price"], "--change needs a categorical feature, got 'price'; there are user, item"),
        (["--matters", "-1"], "--matters must be 0 or more, and finite, got -1"),
        (["--matters", "inf"], "--matters must be 0 or more, and finite, got inf"),
        (["--matters", "nan"], "--matters must be 0 or more, and finite, got nan"),
        (["--events", "400"], "an A/B needs 1,000 labeled events; parquet:"),
        (["--model", "nowhere.py:build"], "nowhere.py does not exist"),
        (["--data", "carrier-pigeon:coop"], "carrier-pigeon:coop"),
    ],
)
def test_invalid_options_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(ab_command(folder, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("place", ["stream", "scores", "checkpoint"])
def test_a_full_disk_ends_the_comparison_which_continues_later(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: object) -> None:
        if place == "checkpoint":  # as torch.save does
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
        raise OSError(errno.ENOSPC, "No space left on device")

    command = ab_command(folder, "--lr", "0.1", "--seeds", "1", "--json")
    with monkeypatch.context() as patch:
        if place == "stream":
            patch.setattr(ab, "encode_stream", full)
        elif place == "scores":
            patch.setattr(RunFiles, "append", full)
        else:
            patch.setattr(runner, "_save_if_due", full)
        assert main(command) == FAILED
    output = capsys.readouterr()
    assert "cannot be written" in output.err
    assert "ree some space" in output.err
    assert "Traceback" not in output.err
    assert output.out == ""
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["events"] == EVENTS


def test_the_help_has_the_exit_codes_that_can_occur(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ab", "--help"])
    _, _, codes = capsys.readouterr().out.partition("exit codes:\n")
    assert re.findall(r"^  (\d+)", codes, re.MULTILINE) == ["0", "1", "2", "5", "130", "141", "143"]
    assert "diverged at every learning rate" in codes
    assert "--max-rejected was rejected" in codes


@pytest.mark.parametrize("option", ["--blocks", "--events", "--batch-size", "--seeds"])
def test_numbers_below_1_are_rejected(folder: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(ab_command(folder, option, "0"))
    assert ended.value.code == 2
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"features": {"user": "category:200", "itme": "category:100"}},
            "clicks.parquet has no column 'itme'",
        ),
        ({"label": "clicked"}, "clicks.parquet has no column 'clicked'"),
        ({"user": "person"}, "clicks.parquet has no column 'person'"),
        (
            {"features": {"item": "category:100"}},
            "missing a required argument: 'user'",
        ),
        (
            {"features": {"user": "category:200", "item": "category:100", "at": "number"}},
            "unexpected keyword argument 'at'",
        ),
        (
            {"features": {"user": "category:1", "item": "category:1"}},
            "events of parquet:FOLDER/clicks.parquet can be used; the first, FOLDER/clicks.parquet, row 0: user: ",
        ),
    ],
)
def test_columns_that_do_not_fit_are_reported_before_any_run(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    kept = {name: [v for v, user in zip(table[name], table["user"], strict=True) if user] for name in table}
    pq.write_table(pa.table(kept), folder / "clicks.parquet")  # no user is 0
    schema = json.loads((folder / "schema.json").read_text())
    (folder / "schema.json").write_text(json.dumps({**schema, **change}))
    assert main(ab_command(folder)) == (1 if "can be used" in message else 2)
    error = capsys.readouterr().err
    assert message.replace("FOLDER", str(folder)) in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()


def test_labels_other_than_0_and_1_are_reported_once_before_any_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    pq.write_table(pa.table({**table, "click": [0.3, *table["click"][1:]]}), folder / "clicks.parquet")
    assert main(ab_command(folder)) == 2
    error = capsys.readouterr().err
    assert "labels must be 0 or 1 for the log loss, AUC and GAUC of an A/B, got 0.3" in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()
    schema = json.loads((folder / "schema.json").read_text())
    (folder / "schema.json").write_text(json.dumps({**schema, "binary": True}))
    main([*ab_command(folder), "--lr", "0.03", "--seeds", "1"])
    told = capsys.readouterr()
    assert "row 0: click: 0.3" in told.out
    assert "failed" not in told.out + told.err


def test_unusable_events_are_reported_once_with_the_first_reason(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    wrong = [900 if row in (5, 700) else user for row, user in enumerate(table["user"])]
    pq.write_table(pa.table({**table, "user": wrong}), folder / "clicks.parquet")
    arguments = [*ab_command(folder), "--lr", "0.03", "--seeds", "1"]
    main(arguments)
    told = capfd.readouterr()
    first = f"the first, {folder / 'clicks.parquet'}, row 5: user: 900 is not from 0 to {USERS - 1}"
    reason = f"2 x user: ... is not from 0 to {USERS - 1}"
    said = f"left out: 2 of 3,000 events (0.1%) of parquet:{folder / 'clicks.parquet'} cannot be used: {reason}"
    assert f"{said}; {first}\n" in told.out
    assert "rejected" not in told.out + told.err


def test_arms_that_diverge_are_not_compared(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "No artists")  # of figures without curves
        assert main(ab_command(folder, "--lr", "1e20,1e25", "--events", "1500")) == FAILED
    printed = capfd.readouterr()
    assert "Not comparable: Adam and CAdam diverged at every learning rate" in printed.out
    assert "rejected" not in printed.out + printed.err, "warnings of single runs are not printed"
    assert "cadam run" not in printed.out, "there is no rate to learn with"


def test_a_failed_run_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.py").write_text(MODEL.replace("(self.users(user)", "(self.nobody(user)"))
    assert main(ab_command(folder, "--lr", "0.03,0.01", "--events", "1500")) == 1
    error = capsys.readouterr().err
    assert "has no attribute 'nobody'" in error
    assert error.endswith("cadam ab: a run failed; the others have recorded their scores\n")


@pytest.mark.parametrize("option", ["--cache", "--output"])
def test_a_folder_that_cannot_be_written_to_is_reported_before_any_run(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (folder / "file").touch()
    arguments = ab_command(folder, option, str(folder / "file" / "below"))
    assert main([*arguments, "--model", "nowhere.py:build"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cadam ab: {option}: {folder / 'file'}")
    assert error.endswith(f"cannot be written to: {folder / 'file'} is not a folder\n")


def test_without_pyarrow_the_command_names_the_package(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(ab_command(folder)) == 5
    assert capsys.readouterr().err.endswith("need pyarrow: pip install pyarrow\n")
    assert not (folder / "runs").exists()


def test_a_number_of_events_is_rounded_up_to_whole_batches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ab_command(folder, "--events", "1480", "--lr", "0.03", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["events"] == 1500


def test_the_file_of_the_model_may_define_the_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [a for a in ab_command(folder, "--lr", "0.03", "--seeds", "1") if not a.endswith("schema.json")]
    arguments.remove("--schema")
    assert main(arguments) == 2
    assert "has no SCHEMA, and --schema is not given" in capsys.readouterr().err
    schema = f"Schema({json.loads((folder / 'schema.json').read_text())['features']}, label='click', user='user')"
    (folder / "model.py").write_text(f"{MODEL}\nfrom cadam.online import Schema\nSCHEMA = {schema}\n")
    assert main(arguments) == 0
    assert "Run more seeds (--seeds)." in " ".join(capsys.readouterr().out.split())


def test_with_a_batch_size_of_one_the_number_of_events_is_exact(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ab", str(folder / "clicks.parquet"), "--label", "click", "--user", "user", "--model", "linear"]
    arguments += ["--batch-size", "1", "--lr", "0.03", "--seeds", "1", "--events", "1999"]
    arguments += ["--cache", str(folder / "runs"), "--output", str(folder / "one.html"), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["events"] == 1999


def test_the_learning_command_has_the_options_of_the_arm() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--data", "csv:a b.csv", "--label", "rating>=4", "--model", "m.py:build"])
    arm = "CAdam:betas=(0.9, 0.99):moments=int8"
    result = make_result(arm=arm, kind="better")
    command = learning_command(options, Study("csv:a b.csv", ("Adam", arm), "m.py:build", 256), result)
    expected = (
        f"cadam run --data 'csv:a b.csv' --label 'rating>=4' --model m.py:build --batch-size 256 --optimizer '{arm}'"
    )
    assert command == f"{expected} --lr 0.03 --checkpoint runs/a-b-ab"
    untrained = make_result(arm=arm, warm_up=None)
    assert not learning_command(options, Study("csv:a b.csv", ("Adam", arm), "m.py:build", 256), untrained)


def test_with_a_batch_size_of_one_arms_without_compiled_code_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ab_command(
        folder, "--arms", "cadam,cadam:moments=int8", "--lr", "0.03", "--batch-size", "1", "--events", "1000"
    )
    arms[arms.index("--model") + 1] = "fm"
    assert main([*arms, "--seeds", "1"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "compiled" in line]
    assert line.startswith("CAdam:moments=int8 learns ")
    assert "moments='int8'" in line


def test_arms_may_be_one_optimizer_with_different_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "cadam, CAdam:moments=int8, cadam:second_moment=row:betas=(0.9,0.99), cadam:confidence@bias.*=false"
    assert main(ab_command(folder, "--arms", arms, "--lr", "0.03", "--events", "1500", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    other = ["CAdam:moments=int8", "CAdam:betas=(0.9, 0.99):second_moment=row", "CAdam:confidence@bias.*=False"]
    assert [pair["arm"] for pair in found["pairs"]] == other
    assert {pair["baseline"] for pair in found["pairs"]} == {"CAdam"}
    assert all(pair["difference"] != 0 for pair in found["pairs"]), "the options did nothing"
    assert sorted(found["ranking"]) == sorted(["CAdam", *other])
    for name in other:
        assert name in (folder / "report.html").read_text()
