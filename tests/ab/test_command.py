"""`cadam ab` from end to end."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.ab import runner
from cadam.ab.run_arm import run_arm
from cadam.ab.study import Study
from cadam.ab.verdict import ACTIONS, Recommendation, Verdict
from cadam.cli.ab import learning_commands, prepare
from cadam.cli.ab_arguments import add_arguments
from cadam.cli.main import main
from tests.ab.helpers import MODEL, USERS, ab_command, make_spec

STUDY = Study("ab-made", "csv:a b.csv", ("Adam", "CAdam"), 50)


@pytest.mark.parametrize("more", [[], ["--seeds", "1"], ["--blocks", "5"]])
def test_arms_that_compute_the_same_make_no_practical_difference(
    more: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ab_command(folder, "--arms", "cadam,cadam:track_alignment=False", "--lr", "0.03", "--json", *more)) == 0
    (found,) = json.loads(capsys.readouterr().out)["recommendations"]
    assert found["action"] == "no practical difference"
    assert found["difference"] == 0
    assert found["reasons"][0].endswith("so an option that only one of them has has no effect.")


def test_the_command_compares_resumes_and_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ab_command(folder, "--arms", "sgdm,adam", "--lr", "0.03", "--change", "item", "--events", "1500")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    answer = printed.split("\n\n")[-2].splitlines()[0]
    assert re.match("Switch|Stay|Undecided|No practical difference", answer), "the answer begins what came out"
    output = " ".join(printed.split())
    assert "SGDM GAUC" in output
    assert re.search(r"(Switch to Adam|Stay with SGDM|Undecided|No practical difference): GAUC with Adam is", output)
    page = (folder / "report.html").read_text()
    assert "with a change of item" in page
    assert "cadam ab --data" in page
    stored = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*.npz")}
    assert len(stored) == 2 * 2 + 2 * 2 * 2 + 2  # tuning; arms, seeds and conditions; A/A
    assert main(arguments) == 0
    again = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*.npz")}
    assert again == stored
    (folder / "model.py").write_text(MODEL.replace("4, sparse", "5, sparse"))
    assert main(arguments) == 2, "the report is that of another model"
    for made in ("report.html", "report.json"):
        (folder / made).unlink()
    assert main(arguments) == 0
    assert len(list((folder / "runs").rglob("*.npz"))) == 2 * len(stored)


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
    monkeypatch.setattr(runner, "count_workers", lambda seconds, limit: jobs)
    (folder / "model.py").write_text(MODEL.replace("super().__init__()", "super().__init__(); print('building')"))
    assert main([*ab_command(folder, "--lr", "0.03", "--events", "1500"), "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["complete"]
    assert "building" in printed.err


def test_json_is_all_that_is_printed_and_has_the_recommendation_as_values(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ab_command(folder, "--lr", "0.03", "--events", "1500"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((folder / "report.json").read_text())
    (found,) = printed["recommendations"]
    assert ACTIONS[found["verdict_kind"]] == found["action"]
    assert (found["treatment"], found["baseline"]) == ("CAdam", "Adam")
    assert found["learning_rates"] == {"CAdam": 0.03, "Adam": 0.03}
    line = next(line for line in printed["rows"] if line["verdict_kind"])
    assert found["difference"] == line["values"]["difference"]
    assert set(found["intervals"]) == {"seeds", "users", "time"}


def test_a_learning_rate_that_is_given_twice_counts_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ab_command(folder, "--lr", "0.03,0.030,0.03", "--events", "1500")) == 0
    assert "run at a learning rate of 0.03 on" in capsys.readouterr().out


def test_the_output_ends_with_the_command_that_learns_with_the_recommended_optimizer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    rows = pq.read_table("clicks.parquet").to_pylist()
    Path("clicks.csv").write_text(
        "\n".join(["user,item,click", *(f"{r['user']},{r['item']},{r['click']:g}" for r in rows)])
    )
    arguments = ["ab", "clicks.csv", "--label", "click", "--batch-size", "50", "--blocks", "24", "--seeds", "1"]
    assert main([*arguments, "--lr", "0.03", "--output", "report.html", "--cache", "runs"]) == 0
    same = "cadam run clicks.csv --label click --batch-size 50"
    commands = {"CAdam": f"{same} --lr 0.03", "Adam": f"{same} --optimizer Adam --lr 0.03"}
    printed = capsys.readouterr().out
    found = json.loads(Path("report.json").read_text())
    assert all(command.startswith(commands[name]) for name, command in found["run"].items())
    told = "".join(f"\n  {line}" for line in found["run"].values())
    assert printed.endswith(
        f"to learn with {' or '.join(found['run'])} from now on, at the best learning rate:{told}\n"
    )
    for command in found["run"].values():
        assert main([*command.split()[1:], "--quiet"]) == 0
    assert len(list(Path("runs").glob("*/model.json"))) == len(found["run"])


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (["better"], ["CAdam"]),
        (["worse"], ["Adam"]),
        (["equivalent"], ["CAdam", "Adam"]),
        (["inconclusive"], ["CAdam", "Adam"]),
        (["diverged"], []),
        (["better", "inconclusive"], ["CAdam"]),
        (["worse", "inconclusive"], ["CLion", "Adam"]),
    ],
)
def test_the_learning_commands_are_those_of_the_recommended_arms(kinds: list[Any], names: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--data", "csv:a b.csv", "--label", "rating>=4", "--model", "m.py:build"])
    recommendations = [
        Recommendation(Verdict(kind, arm, "Adam"), "", values={"learning_rates_to_use": {arm: 0.03, "Adam": 0.01}})
        for kind, arm in zip(kinds, ("CAdam", "CLion"), strict=False)
    ]
    learn = learning_commands(options, STUDY, recommendations)
    assert list(learn) == names
    if names[-1:] == ["Adam"]:
        assert learn["Adam"].startswith(
            "cadam run --data 'csv:a b.csv' --label 'rating>=4' --model m.py:build --batch-size 256 --optimizer Adam "
            "--lr 0.01"
        )
    folders = [command.partition(" --checkpoint ")[2] for command in learn.values()]
    assert len(set(folders)) == len(names)
    assert all(folders) == (len(names) != 1)


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
        (["--tuning-share", "2"], "--tuning-share must be between 0 and 1, got 2"),
        (["--blocks", "5000"], "too few for 5000 blocks"),
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
    assert "GAUC, which decides the A/B on parquet:" in error
    assert " 0.3" in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()
    schema = json.loads((folder / "schema.json").read_text())
    (folder / "schema.json").write_text(json.dumps({**schema, "binary": True}))
    main([*ab_command(folder), "--lr", "0.03", "--seeds", "1"])
    told = capsys.readouterr()
    assert "row 0: click: 0.3" in told.out
    assert "failed" not in told.out + told.err


def test_users_with_one_kind_of_label_have_no_gauc(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    alike = [
        (row < 300 and click) or float(user % 2)
        for row, (user, click) in enumerate(zip(table["user"], table["click"], strict=True))
    ]
    pq.write_table(pa.table({**table, "click": alike}), folder / "clicks.parquet")
    said = (
        f"cadam ab: no user of parquet:{folder / 'clicks.parquet'} has both kinds of label after its first part: GAUC, "
        "which decides the A/B, compares events of one user, by the column user. Name another column with --user"
    )
    assert main(ab_command(folder, "--lr", "0.03")) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not (folder / "runs").exists()
    monkeypatch.setattr(
        "cadam.ab.label_check.LabelCheck.check", lambda *args: None
    )  # as if labels came in separate records
    assert main(ab_command(folder, "--lr", "0.03")) == 1
    assert said in capsys.readouterr().err


def test_labels_that_begin_too_late_to_choose_learning_rates_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    late = [None if row < 1500 else click for row, click in enumerate(table["click"])]
    pq.write_table(pa.table({**table, "click": late, "id": range(3000)}), folder / "clicks.parquet")
    schema = json.loads((folder / "schema.json").read_text())
    (folder / "schema.json").write_text(json.dumps({**schema, "id": "id"}))
    assert main(ab_command(folder, "--lr", "0.03")) == 2
    assert "cadam ab: 0 of the first 600 events of parquet:" in (error := capsys.readouterr().err)
    assert "Leave out the events before labels begin" in error
    assert not (folder / "runs").exists()


def test_unusable_events_are_reported_once_with_the_first_reason(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    wrong = [900 if row in (5, 700) else user for row, user in enumerate(table["user"])]
    pq.write_table(pa.table({**table, "user": wrong}), folder / "clicks.parquet")
    run_arm(make_spec(folder, events=2998))
    assert "rejected" not in caplog.text
    arguments = [*ab_command(folder), "--lr", "0.03", "--seeds", "1"]
    main(arguments)
    told = capfd.readouterr()
    first = f"the first, {folder / 'clicks.parquet'}, row 5: user: 900 is not from 0 to {USERS - 1}"
    reason = f"2 x user: ... is not from 0 to {USERS - 1}"
    said = f"2 of 3,000 events (0.1%) of parquet:{folder / 'clicks.parquet'} cannot be used and are left out: {reason}"
    assert f"{said}; {first}\n" in told.out
    assert "rejected" not in told.out + told.err


def test_a_failed_study_prints_the_command_that_continues(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.py").write_text(MODEL.replace("(self.users(user)", "(self.nobody(user)"))
    arguments = ab_command(folder, "--lr", "0.03,0.01", "--events", "1500")
    assert main(arguments) == 1
    out = capsys.readouterr().out
    (line,) = [line.split() for line in out.splitlines() if line.startswith("  cadam ab ")]
    assert sorted(line) == sorted(["cadam", *arguments])


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


def test_a_number_of_events_is_rounded_up_to_whole_batches(folder: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    study = prepare(parser.parse_args(ab_command(folder, "--events", "1480")[1:])).study
    assert study.events == 1500
    outcome = run_arm(study.spec("Adam", 0.03, 0))
    assert outcome.metrics["events"] == 1500 - 300


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
    arguments += ["--batch-size", "1", "--lr", "0.03", "--seeds", "1", "--blocks", "20", "--events", "1999"]
    arguments += ["--cache", str(folder / "runs"), "--output", str(folder / "one.html"), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendations"][0]["measured_events"] == 1999 - 399


def test_the_learning_command_has_the_options_of_the_arm() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["a.csv", "--label", "click"])
    arm = "CAdam:betas=(0.9, 0.99):moments=int8"
    verdict = Verdict("better", arm, "Adam")
    learn = learning_commands(
        options, STUDY, [Recommendation(verdict, "", values={"learning_rates_to_use": {arm: 0.03}})]
    )
    assert learn == {arm: f"cadam run a.csv --label click --optimizer '{arm}' --lr 0.03"}


def test_with_a_batch_size_of_one_arms_without_compiled_code_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ab_command(
        folder, "--arms", "cadam,cadam:moments=int8", "--lr", "0.03", "--batch-size", "1", "--events", "400"
    )
    arms[arms.index("--model") + 1] = "fm"
    assert main([*arms, "--blocks", "4"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "compiled" in line]
    assert line.startswith("CAdam:moments=int8 learns ")
    assert "moments='int8'" in line


def test_arms_may_be_one_optimizer_with_different_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "cadam, CAdam:moments=int8, cadam:second_moment=row:betas=(0.9,0.99)"
    assert main(ab_command(folder, "--arms", arms, "--lr", "0.03", "--events", "1500", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    other = ["CAdam:moments=int8", "CAdam:betas=(0.9, 0.99):second_moment=row"]
    assert [one["treatment"] for one in found["recommendations"]] == other
    assert {one["baseline"] for one in found["recommendations"]} == {"CAdam"}
    assert all(one["difference"] != 0 for one in found["recommendations"]), "the options did nothing"
    for name in other:
        assert name in (folder / "report.html").read_text()
