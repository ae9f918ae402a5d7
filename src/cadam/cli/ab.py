"""`cadam ab`: compare optimizers on a user's own stream and model."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..ab.analysis import EXPLANATION, summarize
from ..ab.evidence import MAIN_METRIC
from ..ab.label_check import LabelCheck, explain_missing_gauc, has_gauc
from ..ab.report import palette
from ..ab.report.as_json import summary_as_json
from ..ab.report.console import report_problem, show_progress, summary_lines, wrap
from ..ab.report.figures import study_figures, styled, svg
from ..ab.report.page import Section, describe_cost, render_page
from ..ab.report.scoreboard import Scoreboard
from ..ab.run_arm import StreamParts
from ..ab.runner import RunCache, StudyRunner
from ..ab.study import UNCHANGED, Study
from ..ab.summary import Summary
from ..ab.text import join_words
from ..ab.verdict import ACTIONS, Recommendation
from ..atomic_write import replace_file
from ..online import run_config
from ..online.data.events import Batch
from ..online.data.schema import Schema
from ..online.data.sources import Source, open_source
from ..online.data.validation import check_columns
from ..online.metrics.stream import as_clicks
from ..online.models.model_file import OptimizerSpec
from ..online.monitoring.reject_limit import EVENTS_PER_CHECK, rejected_share
from ..online.monitoring.rejection_reasons import format_reasons, generalize_reason, suggest_fix
from ..online.per_event import PerEventTraining
from ..printable import printable, shell_word
from ..statistics.learning_rates import NoLearningRateError
from .ab_arguments import MAX_REJECTED, add_study_arguments
from .arguments import default_batch_size
from .exit_codes import DONE, FAILED, NO_PACKAGE, USAGE, fail, interrupt_code
from .writable_paths import check_file, check_folder

FOLDER = Path("ab")
"""The folder in which each comparison has its own folder."""
COUNT_INTERVAL = 10.0
"""Seconds between lines of progress while events are counted."""
SHARED_OPTIONS = ("label", "user", "time", "id", "ignore", "schema", "model", "width", "hidden", "device")
"""Options about data and model that `cadam run` shares."""
SCOREBOARD_METRICS = {MAIN_METRIC: "GAUC", "log_loss": "log loss"}
NOTES = (
    "GAUC is by impressions. Seeds change the initial weights; the events are the same in every run.",
    "Every run meets the whole stream. It is measured after the first part, on which learning rates were chosen under "
    "other seeds.",
    "The confidence sequence is about the mean over blocks of the GAUC within each block, which differs from the GAUC "
    "of all blocks together.",
)


class TooManyRejectedError(ValueError):
    """A larger share of the events is rejected than `--max-rejected` allows."""


@dataclass(frozen=True)
class Comparison:
    """A comparison as the command line asks for it."""

    study: Study
    seeds: int
    schema: Schema
    resume_command: str
    """The command that continues the comparison."""

    @property
    def identity(self) -> str:
        """A short hash that differs between comparisons with other data, models, settings or seeds."""
        text = json.dumps([asdict(self.study), self.seeds], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"{' against '.join(reversed(self.study.arms))} on {self.study.data}"


def run(options: argparse.Namespace) -> int:
    """Run `cadam ab` and return its exit code."""
    # With --json, standard output has the JSON alone, so messages go to standard error. So does text of the model.
    messages = sys.stderr if options.json else sys.stdout
    try:
        check_folder(options.cache, "--cache")
        if options.output is not None:
            check_file(options.output, "--output")
            # The numbers and the schema are written under the same name as JSON.
            if options.output.suffix.lower() != ".html":
                raise ValueError(f"--output {options.output}: the report is a page, so its name must end in .html")
        with redirect_stdout(messages):
            comparison = prepare(options)
        folder = FOLDER / f"{run_config.short_name(comparison.study.data)}-{comparison.identity}"
        output = options.output or folder / "report.html"
        check_replaces_nothing(output, comparison)
        check_file(output, "--output")
    except ImportError as error:
        return fail("ab", error, NO_PACKAGE)
    except TooManyRejectedError as error:
        return fail("ab", error, FAILED)
    except (ValueError, OSError, AttributeError) as error:
        return fail("ab", error, USAGE)
    cache = RunCache(options.cache)
    runner = StudyRunner(comparison.study, comparison.seeds, cache, force=options.force, workers=options.threads)
    summary = None
    try:
        with redirect_stdout(messages):
            code = compute(runner, is_quiet=options.json)
            if runner.missing == 0:
                summary = summarize(comparison.study, runner.results)
    except NoLearningRateError as error:
        if has_gauc(runner.results):
            return fail("ab", f"{error}; compare again with lower learning rates (--lr)", FAILED)
        return fail("ab", explain_missing_gauc(comparison.study.data, comparison.schema.user), FAILED)
    numbers = as_json(comparison, runner, summary, output, options)
    with redirect_stdout(messages):
        # The report is written before anything is printed, because the reader of the output may close it.
        try:
            size = 0 if summary is None else write_report(comparison, runner, summary, numbers, output)
        except OSError as error:
            advice = "the results are cached, and the same command writes the report"
            return fail("ab", f"the report cannot be written: {error}; {advice}", FAILED)
        if not options.json:
            print("", *(_missing_lines(comparison, runner) if summary is None else summary_lines(summary)), sep="\n")
        if summary is not None:
            print(f"\nreport: {printable(output)} ({size / 1e6:.2f} MB)")
            if commands := numbers["run"]:
                print(f"to learn with {' or '.join(commands)} from now on, at the best learning rate:")
                print("\n".join(f"  {line}" for line in commands.values()))
    if options.json:
        print(json.dumps(numbers, indent=1, allow_nan=False))
    return code


def compute(runner: StudyRunner, is_quiet: bool) -> int:
    """Compute the missing runs, show their progress, and return the exit code."""
    study, seeds = runner.study, runner.seeds
    title = f"{' against '.join(study.arms)} on {study.data}: prequential evaluation"
    board = Scoreboard(study.name, title, study.arms, SCOREBOARD_METRICS, UNCHANGED)
    try:
        if is_quiet:
            runner.notify = report_problem
            runner.run()
        else:
            with show_progress(study, seeds, board) as runner.notify:
                runner.run()
    except KeyboardInterrupt as error:
        print("interrupted: finished runs are cached, and the same command continues from there", file=sys.stderr)
        return interrupt_code(error)
    return FAILED if runner.failures else DONE


def _missing_lines(comparison: Comparison, runner: StudyRunner) -> list[str]:
    failed = f", {len(runner.failures)} of them failed" if runner.failures else ""
    lines = wrap("  ", f"incomplete: {runner.missing} runs are missing{failed}; this command continues:")
    return [*lines, f"  {comparison.resume_command}"]


def as_json(
    comparison: Comparison, runner: StudyRunner, summary: Summary | None, output: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return everything that is known about a comparison, for JSON."""
    recommendations = () if summary is None else summary.recommendations
    return {
        "identity": comparison.identity,
        "command": comparison.resume_command,
        "run": learning_commands(options, comparison.study, recommendations),
        "report": str(output),
        "experiment": comparison.study.name,
        "title": comparison.title,
        "seeds": comparison.seeds,
        "complete": summary is not None,
        "runs": len(runner.results),
        "failed": [str(spec) for spec in runner.failures],
        "seconds": runner.results.seconds,
        **({} if summary is None else summary_as_json(summary)),
    }


def write_report(
    comparison: Comparison, runner: StudyRunner, summary: Summary, numbers: Mapping[str, Any], output: Path
) -> int:
    """Write the page, its numbers and the schema; return the size of the page in bytes."""
    study, results = comparison.study, runner.results
    figures = styled(partial(study_figures, study, results))
    section = Section(
        name=study.name,
        title=comparison.title,
        description=f"{study.events:,} events, predicted by the model {study.model} before it learns from them.",
        command=comparison.resume_command,
        facts=describe_cost(results, "runs"),
        explanation=EXPLANATION,
        summary=summary,
        figures={
            caption: svg(figure, f"{study.name}-{number}", caption)
            for number, (caption, figure) in enumerate(figures.items(), 1)
        },
        notes=NOTES,
    )
    page = render_page(comparison.title, section).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    schema_path = output.with_suffix(".schema.json")
    if not _has_schema(schema_path, comparison.schema):
        comparison.schema.write(schema_path)
    replace_file(output, page)
    replace_file(output.with_suffix(".json"), f"{json.dumps(numbers, indent=1, allow_nan=False)}\n".encode())
    return len(page)


def check_replaces_nothing(output: Path, comparison: Comparison) -> None:
    """Raise ValueError if the report would replace a file that is not a report of the same comparison."""
    numbers_path, schema_path = output.with_suffix(".json"), output.with_suffix(".schema.json")
    data = {path.resolve() for path in _data_files(comparison.study.data)}
    for path in (output, numbers_path, schema_path):
        if path.resolve() in data:
            raise ValueError(f"{path} is the data, and would be replaced by the report: choose another --output")
    try:
        is_same = json.loads(numbers_path.read_text(encoding="utf-8"))["identity"] == comparison.identity
    except (OSError, ValueError, KeyError, TypeError):
        is_same = False
    if is_same:
        return
    existing = [path for path in (output, numbers_path) if path.exists()]
    if schema_path.exists() and not _has_schema(schema_path, comparison.schema):
        existing.append(schema_path)
    if existing:
        names = join_words(map(str, existing))
        verb = "exists and is not a report" if len(existing) == 1 else "exist and are not reports"
        raise ValueError(f"{names} {verb} of this comparison: move the file, or choose another --output")


def _has_schema(path: Path, schema: Schema) -> bool:
    """Return whether a file has this schema; it may have comments that another file would not have."""
    try:
        return Schema.read(path) == schema
    except (OSError, ValueError):
        return False


def prepare(options: argparse.Namespace) -> Comparison:
    """Check the options, count the events, and return the comparison.

    Raises:
        ValueError: If an option or the data does not fit.
    """
    uri = run_config.data_uri(options)
    if uri.partition(":")[2] == "-":
        raise ValueError("standard input can be read only once, and an A/B reads its stream many times: use a file")
    arms, grid = _parse_arms(options.arms), tuple(dict.fromkeys(map(_parse_rate, options.lr.split(","))))
    if not 0 <= options.matters < math.inf:
        raise ValueError(f"--matters must be 0 or more, and finite, got {options.matters:g}")
    config = run_config.read_config(options)
    schema = config.schema
    simulated = _simulated_changes(options, schema)
    source = open_source(uri, schema, batch_size=options.batch_size, patience=None)
    check_columns(source, schema)
    model = config.build_model()
    for arm in arms if options.batch_size == 1 else ():
        compiled = PerEventTraining.create(model, OptimizerSpec.parse(arm).build(model, grid[0]), config.loss)
        if isinstance(compiled, str):
            print(f"{arm} learns {compiled}; that is hundreds of times slower than compiled code")
    events = _count_events(source, uri, schema, options)
    if schema.user is None:
        print("the schema has no user: GAUC is then the AUC of all events together")
    rates = f"{len(grid)} learning rates" if len(grid) > 1 else f"a learning rate of {grid[0]:g}"
    print(
        f"{events:,} events. {' and '.join(arms)} run at {rates} on the first {options.tuning_share:.0%}, then on all "
        f"events under {options.seeds} seeds. To be quicker: --events N, --seeds N, or fewer --lr"
    )
    model_file = config.model.rpartition(":")[0]
    study = Study(
        name=f"ab-{hashlib.sha256(f'{config.model} {uri}'.encode()).hexdigest()[:8]}",
        data=uri,
        model=config.model,
        arms=arms,
        batch_size=options.batch_size,
        grid=grid,
        tuning_share=options.tuning_share,
        blocks=options.blocks,
        events=events,
        simulated=simulated,
        settings={
            "schema": schema.settings(),
            **({"model file": _digest([Path(model_file)])} if model_file else config.settings),
            "data": _digest(_data_files(uri)),
            # Other devices add numbers in another order, so results on the CPU are not those on CUDA.
            **({} if config.device is None or config.device.type == "cpu" else {"device": str(config.device)}),
        },
        matters=options.matters,
    )
    return Comparison(study, options.seeds, schema, resume_command(options, uri))


def _parse_arms(text: str) -> tuple[str, ...]:
    # A comma inside an option, as in betas=(0.9,0.99), is followed by a number.
    arms = tuple(str(OptimizerSpec.parse(arm)) for arm in re.split(r",(?!\s*[-.\d])", text))
    if len(arms) < 2:
        raise ValueError(f"--arms needs two or more optimizers, got {text!r}")
    if repeated := [arm for arm, count in Counter(arms).items() if count > 1]:
        raise ValueError(f"--arms needs different optimizers, and has {repeated[0]} more than once")
    if len(arms) > len(palette.SERIES):
        raise ValueError(f"--arms takes up to {len(palette.SERIES)} optimizers, got {len(arms)}")
    return arms


def _parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise ValueError(f"--lr must be numbers, as in 0.01,0.1; got {text!r}") from None
    if not 0 < rate < math.inf:
        raise ValueError(f"--lr: learning rates must be above 0 and finite, got {text!r}")
    return rate


def _simulated_changes(options: argparse.Namespace, schema: Schema) -> dict[str, Mapping[str, Any]]:
    if not 0 < options.tuning_share < 1:
        raise ValueError(f"--tuning-share must be between 0 and 1, got {options.tuning_share:g}")
    if options.delay is not None and not options.delay > 0:
        raise ValueError(f"--delay must be above 0, got {options.delay:g}")
    simulated: dict[str, Mapping[str, Any]] = {}
    if options.change is not None:
        sizes = {name: kind.size for name, kind in schema.kinds.items() if kind.size and not kind.length}
        if options.change not in sizes:
            raise ValueError(
                f"--change needs a categorical feature, got {options.change!r}; there are {', '.join(sizes)}"
            )
        blocks = [options.blocks // 3, 2 * options.blocks // 3]
        simulated[f"with a change of {options.change}"] = {"change": {"feature": options.change, "blocks": blocks}}
    if options.noise is not None:
        simulated[f"with {options.noise:.0%} label noise"] = {"noise": options.noise}
    if options.delay is not None:
        simulated[f"with labels delayed by {options.delay:g}"] = {"delay": options.delay}
    return simulated


def _count_events(source: Source, uri: str, schema: Schema, options: argparse.Namespace) -> int:
    """Count the events that are used, and check their labels.

    The stream is read as far as `--events` needs.

    Raises:
        TooManyRejectedError: If no event can be used, or more are rejected than `--max-rejected` allows.
        ValueError: If labels are not 0 or 1, or there are too few events or labels.
    """
    events, first_reject, last_print = 0, "", time.monotonic()
    reasons: Counter[str] = Counter()
    label_check = LabelCheck()
    for batch in source:
        if options.events is not None and events >= options.events:
            break
        if time.monotonic() - last_print > COUNT_INTERVAL:
            last_print = time.monotonic()
            print(f"counting events: {events:,} so far; --events N uses only the first N", flush=True)
        if not isinstance(batch, Batch):
            continue
        events += 0 if batch.events is None else len(batch.events)
        reasons.update(generalize_reason(record.reason) for record in batch.rejected)
        if batch.rejected and not first_reject:
            first_reject = f"the first, {batch.rejected[0].where}: {batch.rejected[0].reason}"
        for part in (batch.events, batch.labels):
            if part is not None and part.labels is not None:
                as_clicks(part.labels[~np.isnan(part.labels)], f"GAUC, which decides the A/B on {uri}")
        label_check.update(batch)
        if events + reasons.total() >= EVENTS_PER_CHECK and reasons.total() > events:
            break  # most events are rejected, so the rest is not worth reading
    if reasons and not events:
        raise TooManyRejectedError(f"none of {reasons.total():,} events of {uri} can be used; {first_reject}")
    if rejected := reasons.total():
        share = rejected_share(rejected, events)
        text = f"{rejected:,} of {events + rejected:,} events ({share:.1%}) of {uri} cannot be used"
        if share > options.max_rejected:
            advice = suggest_fix(reasons, schema)
            raise TooManyRejectedError(
                f"{text}: {format_reasons(reasons)}; {first_reject}. {advice[:1].upper()}{advice[1:]}"
            )
        print(printable(f"{text} and are left out: {format_reasons(reasons)}; {first_reject}"))
    if options.events is not None:
        events = min(events, -(-options.events // options.batch_size) * options.batch_size)
    sizes = {"batch_size": options.batch_size, "tuning_share": options.tuning_share, "blocks": options.blocks}
    label_check.check(uri, schema.user, StreamParts.of(events, sizes))
    return events


def resume_command(options: argparse.Namespace, uri: str) -> str:
    """Return the command that continues a comparison."""
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    words = ["--data", uri]
    names = [action.dest for action in parser._actions if action.dest not in ("help", "place", "data")]
    changed = [name for name in names if getattr(options, name) != parser.get_default(name)]
    for name in (*changed, "seeds", "cache", *(["output"] if options.output else [])):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return " ".join(["cadam ab", *map(shell_word, words)])


def learning_commands(
    options: argparse.Namespace, study: Study, recommendations: Sequence[Recommendation]
) -> dict[str, str]:
    """Return, by optimizer, the `cadam run` command that learns with a recommended optimizer at its learning rate.

    If no arm is better than the baseline, these are the baseline and all arms that may be as good. There are none if
    runs diverged.
    """
    usable = [each for each in recommendations if each.verdict.kind != "diverged"]
    better = [each.verdict.arm for each in usable if each.action == ACTIONS["better"]]
    as_good = [each.verdict.arm for each in usable if each.action != ACTIONS["worse"]]
    rates = {name: rate for each in usable for name, rate in each.values["learning_rates_to_use"].items()}
    names = better or [*as_good, *([study.baseline] if usable else [])]
    # Several runs need several folders: a run does not resume from the checkpoint of another optimizer.
    folder = f"runs/{run_config.short_name(study.data)}-" if len(names) > 1 else ""
    folders = {name: folder and folder + re.sub(r"[^\w.-]+", "-", name).strip("-") for name in names}
    return {name: _run_command(options, study.data, name, rates[name], folders[name]) for name in names}


def _run_command(options: argparse.Namespace, uri: str, optimizer: str, lr: float, folder: str) -> str:
    """Return the `cadam run` command for the same data and model; an empty folder stands for the default."""
    is_own_model = options.model is not None and ":" in options.model
    values: dict[str, Any] = {name: getattr(options, name) for name in SHARED_OPTIONS}
    if options.batch_size != default_batch_size(is_own_model):
        values["batch_size"] = options.batch_size
    if options.max_rejected != MAX_REJECTED:
        values["max_rejected"] = options.max_rejected
    if optimizer != "CAdam":
        values["optimizer"] = optimizer
    values |= {"lr": f"{lr:g}", "checkpoint": folder or None}
    words = [options.place] if options.place is not None else ["--data", uri]
    for name, value in values.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return " ".join(["cadam run", *map(shell_word, words)])


def _data_files(uri: str) -> list[Path]:
    """Return the files of a stream; none if the stream is not in files."""
    path = Path(uri.partition(":")[2])
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []


def _digest(paths: Sequence[Path]) -> str:
    """Return a hash of the content of files, so that changed files lead to new results."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:20]
