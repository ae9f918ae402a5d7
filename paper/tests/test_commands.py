"""The commands of the paper: their output and their exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import walks

from cadam.cli import main
from cadam.statistics.comparison import KINDS
from cadam_paper import catalog, experiment_commands
from cadam_paper.harness import command as shared
from cadam_paper.harness import console, runner
from cadam_paper.harness.experiment import Data
from cadam_paper.harness.results import TUNING_SEEDS, Outcome, Provenance, Result, Results, RunSpec

HERE = Path(__file__).parent
Cadam = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cadam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cadam:
    monkeypatch.chdir(tmp_path)
    experiments = {"walk": "walks:WALK", "tuned": "walks:TUNED"}
    monkeypatch.setattr(catalog, "EXPERIMENTS", experiments)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main.main(list(arguments))
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_reproduce_prints_paper_and_measurement(cadam: Cadam) -> None:
    code, out, err = cadam("reproduce", "walk")
    assert (code, err) == (0, "")
    assert "walk: 6 of 6 runs" in out
    assert "paper:    Nothing." in out
    assert "verdict:  CAdam's mean loss is" in out
    assert Path("results/cache/walk").is_dir()


def test_quiet_prints_nothing(cadam: Cadam) -> None:
    assert cadam("reproduce", "walk", "--quiet") == (0, "", "")


def test_json_has_the_table(cadam: Cadam) -> None:
    code, out, _ = cadam("reproduce", "all", "--json", "--seeds", "2")
    walk, tuned = json.loads(out)
    assert code == 0
    assert (walk["experiment"], walk["seeds"], walk["runs"], walk["complete"]) == ("walk", 2, 4, True)
    assert tuned["runs"] == 16
    assert walk["rows"][0]["values"]["CAdam"] == pytest.approx(walk["rows"][0]["values"]["Adam"], abs=1)
    assert walk["rows"][0]["verdict_kind"] in KINDS
    assert (walk["rows"][0]["conflicting"], walk["verdicts"]) == (False, {})
    one = json.loads(cadam("reproduce", "walk", "--json", "--seeds", "1")[1])[0]
    assert one["rows"][0]["verdict_kind"] == "inconclusive"
    assert one["rows"][0]["values"]["low"] is None, "JSON has no nan"


def test_a_failing_run_is_exit_code_1(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TEST_FAIL", "Adam 0")
    code, out, err = cadam("reproduce", "walk")
    assert code == 1
    assert "failure of the test" in err
    assert "incomplete: 1 runs are missing, 1 of them failed" in " ".join(out.split())
    code, _, err = cadam("report")
    assert code == 1
    assert err.startswith("walk: 1 ")
    code, out, _ = cadam("reproduce", "walk", "--json")
    assert code == 1
    assert json.loads(out)[0]["failed"] != []


def test_after_an_interrupt_the_counts_add_up(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished and missing runs add up to the total, and the next command computes exactly the missing ones."""
    monkeypatch.setattr(walks, "WALK", dataclasses.replace(walks.WALK, compute=_interrupted))
    monkeypatch.setattr(_interrupted, "left", 4, raising=False)
    code, out, err = cadam("reproduce", "walk")
    assert code == 130
    assert "continues from there" in err
    counted, missing_runs = re.search(r"walk: (\d+) of (\d+) runs", out), re.search(r"(\d+) runs are missing", out)
    assert counted
    assert missing_runs
    done, total, missing = int(counted[1]), int(counted[2]), int(missing_runs[1])
    assert (done, total) == (4, 6)
    assert done + missing == total
    one_line = json.loads(cadam("list", "--json")[1])[0]["state"]
    assert one_line == "4 runs so far"


def test_a_command_at_its_time_limit_says_how_to_continue(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TEST_SLEEP", "0.7")
    code, out, err = cadam("reproduce", "walk", "--jobs", "1", "--seconds", "1")
    assert code == 130
    assert "the same command continues" in err
    assert "5 runs are missing" in " ".join(out.split())


def test_the_command_that_continues_names_the_cache(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "WALK", dataclasses.replace(walks.WALK, compute=_interrupted))
    monkeypatch.setattr(_interrupted, "left", 4, raising=False)
    continuation = "cadam reproduce walk --quick --cache 'my store'"
    assert f"  {continuation}\n" in cadam("reproduce", "walk", "--cache", "my store")[1]
    assert cadam("report", "walk", "--cache", "my store")[2].endswith(f": {continuation}\n")
    assert (
        "run `cadam reproduce tuned --quick --cache 'my store'`" in cadam("report", "tuned", "--cache", "my store")[2]
    )


def _interrupted(spec: RunSpec) -> Outcome:
    if _interrupted.left == 0:  # type: ignore[attr-defined]
        raise KeyboardInterrupt
    _interrupted.left -= 1  # type: ignore[attr-defined]
    return walks.compute(spec)


def test_the_help_names_the_default_scale(cadam: Cadam) -> None:
    assert "default: what was last run" in " ".join(cadam("report", "--help")[1].split())
    assert "default: --quick" in " ".join(cadam("reproduce", "--help")[1].split())


@pytest.mark.parametrize("command", ["reproduce", "report"])
def test_a_mistyped_name_gets_a_suggestion(cadam: Cadam, command: str) -> None:
    code, _, err = cadam(command, "wlak")
    assert code == 2
    assert "did you mean 'walk'?" in err
    assert "did you mean 'walk'?" in cadam(command, "WALK")[2]
    code, _, err = cadam(command, "nonsense-entirely")
    assert code == 2
    assert "walk, tuned" in err


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--seeds", "x"], ["--quick", "--full"], ["--json", "--quiet"]])
def test_wrong_options_are_exit_code_2(cadam: Cadam, wrong: list[str]) -> None:
    code, _, err = cadam("reproduce", "walk", *wrong)
    assert code == 2
    assert "_" not in err.splitlines()[-1], "no Python identifiers"


def test_missing_data_is_reported_with_its_name_source_and_size(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data("Clicks", "clicks/train.txt", "https://example.org/clicks", "11 GB")
    monkeypatch.delenv("CADAM_DATA", raising=False)
    monkeypatch.setattr(walks, "WALK", dataclasses.replace(walks.WALK, data=data))
    code, _, err = cadam("reproduce", "walk")
    assert code == 3
    for text in ("Clicks", "11 GB", "https://example.org/clicks", "data/clicks/train.txt", "CADAM_DATA"):
        assert text in err
    code, out, err = cadam("reproduce", "all")  # the experiments whose data are available are computed
    assert (code, re.findall(r"^(\w+): \d+ of", out, re.MULTILINE)) == (0, ["tuned"])
    assert "walk: Clicks (11 GB) is not at" in err
    Path("data/clicks").mkdir(parents=True)
    Path("data/clicks/train.txt").touch()
    assert cadam("reproduce", "walk")[0] == 0
    Path("data/clicks/train.txt").unlink()
    assert cadam("reproduce", "walk")[0] == 0  # all results are stored, so nothing is computed
    assert cadam("reproduce", "walk", "--force")[0] == 3


def test_a_missing_cuda_device_is_reported_once_before_any_run(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("WALK", "TUNED"):
        experiment = dataclasses.replace(getattr(walks, name), cuda=("full",))
        monkeypatch.setattr(walks, name, experiment)
    code, out, err = cadam("reproduce", "walk", "tuned", "--full")
    assert (code, out) == (3, "")
    assert err.startswith("walk, tuned: ")
    assert "CUDA device" in err
    assert err.count("\n") == 1
    assert not list(Path("results").glob("specs/*/*.json"))
    assert "--full: about 2.0 s on a CUDA device, needs no data" in cadam("list")[1]
    assert cadam("reproduce", "walk", "--quick")[0] == 0
    assert "walk, tuned: " in cadam("reproduce", "all", "--full")[2]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda: 0)
    assert cadam("reproduce", "walk", "--full")[0] == 0
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cadam("reproduce", "walk", "--full")[0] == 0  # all results are stored, so nothing is computed


def test_only_small_continual_learning_needs_no_cuda_device_at_full_scale_among_studies_of_networks() -> None:
    studies = ("cadam_paper.images", "cadam_paper.ctr", "cadam_paper.language_models", "cadam_paper.continual")
    full = {name for name, location in catalog.EXPERIMENTS.items() if location.startswith(studies)} - {
        "continual-small"
    }
    assert {name for name in catalog.EXPERIMENTS if catalog.find(name).cuda} == full
    assert all(catalog.find(name).cuda == ("full",) for name in full)


def test_a_cache_that_cannot_be_written_to_is_reported(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "results/cache/.locks")

    monkeypatch.setattr(runner, "run", refuse)
    code, _, err = cadam("reproduce", "walk")
    assert code == 1
    assert "cache cannot be written to" in err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["reproduce", "walk"], "--cache"),
        (["demo"], "--cache"),
        (["demo"], "--output"),
        (["report"], "--output"),
        (["report"], "--images"),
    ],
)
def test_an_output_that_cannot_be_written_to_is_reported_before_any_run(
    cadam: Cadam, arguments: list[str], option: str
) -> None:
    Path("file").touch()
    code, out, err = cadam(*arguments, option, "file/below")
    assert (code, out) == (2, "")
    assert err.startswith(f"cadam {arguments[0]}: {option}: file")
    assert err.endswith("cannot be written to: file is not a folder\n")
    assert not Path("results").exists()


def test_list_shows_the_data_that_each_scale_needs(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = Data("Photographs", "photos", "nowhere", "2 GB"), Data("digits", "", "a package", "in it")
    walk = dataclasses.replace(walks.WALK, data=large, quick_data=small)
    monkeypatch.setattr(walks, "WALK", walk)
    out = cadam("list")[1]
    assert "--quick: about 1.0 s, needs digits (from a package, in it)\n" in out
    assert "--full: about 2.0 s, needs Photographs (from nowhere, 2 GB)\n" in out
    assert out.count("needs no data") == 2
    rows = json.loads(cadam("list", "--json")[1])
    walk_needs = {"quick": "digits (from a package, in it)", "full": "Photographs (from nowhere, 2 GB)"}
    assert [row["data"] for row in rows] == [walk_needs, {"quick": None, "full": None}]


def test_list_shows_state_and_time(cadam: Cadam) -> None:
    code, out, _ = cadam("list")
    assert code == 0
    assert out.count("not run") == 2
    assert "--quick: about 1.0 s" in out
    assert "--full: about 2.0 s" in out
    cadam("reproduce", "walk", "--seeds", "2")
    rows = json.loads(cadam("list", "--json")[1])
    assert {row["name"]: row["state"] for row in rows} == {"walk": "done (quick, 2 seeds)", "tuned": "not run"}


def test_list_distinguishes_published_from_local_results(cadam: Cadam) -> None:
    def state(cache: str) -> str:
        return str(json.loads(cadam("list", "--json", "--archive", "published", "--cache", cache)[1])[0]["state"])

    cadam("reproduce", "walk", "--seeds", "2", "--cache", "here")
    assert cadam("archive", "walk", "--dirty", "--archive", "published", "--cache", "here")[0] == 0
    assert state("here") == "done (quick, 2 seeds)"
    assert state("empty") == "published (quick, 2 seeds)"


def test_report_shows_what_was_run(cadam: Cadam) -> None:
    code, _, err = cadam("report")
    assert code == 4
    assert "cadam reproduce" in err
    cadam("reproduce", "walk", "--seeds", "2")
    code, _, _ = cadam("report", "--images", "images")
    assert code == 0
    text = Path("results/report.html").read_text()
    assert "A walk" in text
    assert "A tuned walk" not in text
    assert "cadam reproduce walk --quick --seeds 2" in text
    assert Path("images/walk-1.png").stat().st_size > 1000
    code, _, err = cadam("report", "tuned", "--output", "other.html")
    assert code == 4
    assert "has results of tuned" in err
    assert "cadam reproduce tuned" in err


def test_a_report_omits_experiments_that_merely_share_runs(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experiments share runs. `longer` needs more runs and was never requested."""
    longer = dataclasses.replace(walks.WALK, name="longer", title="A longer walk", seeds={"quick": 5})
    monkeypatch.setattr(walks, "LONGER", longer, raising=False)
    monkeypatch.setitem(catalog.EXPERIMENTS, "longer", "walks:LONGER")
    assert cadam("reproduce", "walk", "--quiet")[0] == 0
    assert cadam("report")[::2] == (0, "")
    assert "A longer walk" not in Path("results/report.html").read_text()
    code, _, err = cadam("report", "longer")
    assert (code, err.startswith("longer: 4 ")) == (1, True)


def test_a_report_includes_an_interrupted_experiment(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requested experiment is included even if no run finished, but not at a scale that was never requested."""
    assert cadam("reproduce", "tuned", "--quiet")[0] == 0
    monkeypatch.setattr(walks, "WALK", dataclasses.replace(walks.WALK, compute=_interrupted))
    monkeypatch.setattr(_interrupted, "left", 0, raising=False)
    assert cadam("reproduce", "walk", "--full")[0] == 130
    code, _, err = cadam("report")
    assert code == 1
    assert err.startswith("walk: 12 ")
    assert err.endswith(": cadam reproduce walk --full\n")
    assert cadam("report", "--quick")[::2] == (0, "")


@pytest.mark.parametrize("options", [["--full"], ["--full", "--seeds", "2"], ["--quick", "--seeds", "2"]])
def test_a_report_without_results_names_the_command_that_makes_them(cadam: Cadam, options: list[str]) -> None:
    cadam("reproduce", "tuned", "--quiet")
    code, _, err = cadam("report", "walk", *options)
    assert code == 4
    assert f"has results of walk: run `cadam reproduce walk {' '.join(options)}`" in err


def test_a_report_of_a_scale_has_the_rows_of_the_published_plan(cadam: Cadam) -> None:
    """The published plan, which limits the rows, is used even if the last local run had another scale."""
    published = Path("published")
    published.mkdir()
    (published / "plans.json").write_text('{"walk": {"scale": "full", "seeds": 3, "data": "", "rows": 100}}')
    cadam("reproduce", "walk", "--quiet")
    code, _, err = cadam("report", "walk", "--full", "--archive", "published")
    assert "cadam reproduce walk --full --rows 100" in err, code


@pytest.mark.parametrize("command", ["report", "demo"])
def test_without_matplotlib_nothing_is_computed(cadam: Cadam, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
    code, out, err = cadam(command)
    assert (code, out) == (5, "")
    assert err == "figures need matplotlib: in a clone of the project, pip install '.[online]'\n"
    assert not Path("results").exists()


def test_the_remaining_time_is_unknown_before_the_first_run() -> None:
    walk = walks.WALK
    spec = walks.make_spec("Adam", 0.1, 0)
    progress = console.Progress([runner.Request(walk, walk.plan("quick"), missing=[spec])])
    progress.update(runner.Event("start", walk, spec))
    assert progress.describe_rest() == "starting"
    progress.update(runner.Event("failed", walk, spec))
    assert progress.describe_rest() == "about 0.0 s left"


def test_progress_counts_the_runs_that_follow_tuning(cadam: Cadam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL", 0.0)
    lines = [line for line in cadam("reproduce", "tuned", "--jobs", "1")[1].splitlines() if line.startswith("tuned: ")]
    assert lines[0].startswith("tuned: 1 of about 18 runs; about ")
    assert lines[11].startswith("tuned: 12 of about 18 runs; about ")
    assert lines[12].startswith("tuned: 13 of 18 runs; about ")
    assert lines[-1] == "tuned: 18 of 18 runs"


def test_the_remaining_time_depends_on_the_remaining_work() -> None:
    """Twelve runs have weight 2 and six have weight 3: after the first twelve, 18 of 42 parts remain."""
    tuned = dataclasses.replace(walks.TUNED, weight=_heavier_after_tuning, seconds={"quick": 42, "full": 1})
    request = runner.Request(tuned, tuned.plan("quick"))
    runner.look_up(request, lambda experiment, spec: None)
    progress = console.Progress([request])
    results = {}
    for spec in request.missing:
        results[spec] = result = Result(spec, walks.compute(spec), Provenance(1.0, 1, "none", {}))
        progress.update(runner.Event("stored", tuned, spec, result))
    assert len(request.missing) == 12
    assert progress.seconds_left() == pytest.approx(18)
    diverged = dataclasses.replace(result, outcome=Outcome({"loss": float("nan")}, {}))
    assert runner.later_specs(request, diverged) == []
    runner.look_up(request, lambda experiment, spec: results.get(spec))
    assert progress.total(request) == 18  # the runs of the later phase are listed now, and must not be counted twice
    assert progress.seconds_left() == pytest.approx(18)


def _heavier_after_tuning(spec: RunSpec) -> float:
    return 2.0 if spec.seed >= TUNING_SEEDS else 3.0


@pytest.mark.parametrize("width", [50, 90])
def test_lines_fit_the_terminal(cadam: Cadam, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = cadam("reproduce", "walk")[1]
    assert "undecided" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= width


def test_a_reader_may_close_the_pipe() -> None:
    """The reader of `cadam list --json | head -1` closes the pipe while there is more output than it can buffer."""
    code = (
        "import sys\nfrom cadam.cli.main import main\nfrom cadam_paper import commands, experiment_commands\n"
        "from cadam_paper.harness.command import print_lines\n"
        "experiment_commands.list_experiments = lambda options: print_lines(['x' * 1000] * 1000) or 0\n"
        "sys.exit(main(['list'], extra=(commands.add_commands,)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_reader_may_close_the_pipe_while_progress_is_printed(tmp_path: Path) -> None:
    """After `cadam reproduce NAME | head -1` the command ends without a message, and finished runs are stored."""
    call = [
        sys.executable,
        str(HERE / "run_test_experiments.py"),
        "reproduce",
        "walk",
        "--cache",
        str(tmp_path / "specs"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""
    assert len(list((tmp_path / "specs" / "walk").glob("*.json"))) == 6 + 1  # six results and the plan


def test_a_pipe_that_is_not_the_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> int:
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(experiment_commands, "list_experiments", fail)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main.main(["list"])


def test_a_damaged_result_is_reported_by_every_command(cadam: Cadam) -> None:
    cadam("reproduce", "walk")
    broken = next(path for path in sorted(Path("results/cache/walk").glob("*.json")) if path.name != "plan.json")
    broken.write_text("{}")
    for arguments in (["list"], ["report"]):
        expected = f"damaged, and missing until `cadam reproduce` computes it again: {broken.absolute()}"
        assert cadam(*arguments)[2].startswith(expected), arguments
    assert f"damaged, computing it again: {broken.absolute()}" in cadam("reproduce", "walk")[2]
    assert cadam("report")[2] == "", "it was computed again"
    Path("results/cache/walk/plan.json").write_text("{")
    assert "plan.json" in cadam("report")[2]


def test_on_a_terminal_there_is_a_live_display(tmp_path: Path) -> None:
    """The display shows bars, the number of runs and the remaining time, and is updated in place."""
    ours, theirs = pty.openpty()
    call = [
        sys.executable,
        str(HERE / "run_test_experiments.py"),
        "reproduce",
        "walk",
        "--cache",
        str(tmp_path / "specs"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LAB_TEST_SLEEP": "0.1",
        "TERM": "xterm",
        "COLUMNS": "100",
    }
    process = subprocess.Popen(call, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux raises it when the other end of the terminal is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait(60) == 0
    text = seen.decode()
    assert "6 of 6 runs" in text
    assert "left" in text
    assert "\x1b[" in text


def test_importing_cadam_stays_light() -> None:
    check = "import sys, cadam; print([m for m in ('matplotlib', 'rich', 'cadam_paper') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", catalog.EXPERIMENTS)
def test_every_experiment_of_the_catalog_lists_its_runs(name: str) -> None:
    experiment = catalog.find(name)
    assert experiment.name == name
    for scale in ("quick", "full"):
        specs = experiment.run_specs(experiment.plan(scale), Results())
        ab = name.replace("rates-", "ab-").removesuffix("-controls")
        shared = {"images"}, {"ctr"}, {"language-models"}, {"continual"}, {ab}
        assert {spec.experiment for spec in specs} in ({name}, *shared)
        assert len(set(specs)) == len(specs) > 0
        assert experiment.estimate(experiment.plan(scale)) > 0


def test_the_help_lists_the_commands_of_the_product_before_those_of_the_paper(cadam: Cadam) -> None:
    _, out, _ = cadam("--help")
    product, _, of_the_paper = out.partition("commands of the paper's experiments:")
    assert "    ab " in product
    assert "    reproduce " in of_the_paper
    assert "    reproduce " not in product
