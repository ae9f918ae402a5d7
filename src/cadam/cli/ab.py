"""`cadam ab`: the A/B as a study of a user's own stream and model."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cadam_paper.harness import command
from cadam_paper.harness.cache import Cache
from cadam_paper.harness.experiment import Experiment, Plan
from cadam_paper.harness.report import Heading
from cadam_paper.harness.runner import Request
from cadam_paper.harness.scoreboard import Scoreboard

from ..ab import runs
from ..ab import study as studies
from ..ab.labelled import Labelled, has_gauc, no_gauc
from ..ab.report import palette
from ..ab.results import Results, RunSpec
from ..ab.study import AS_IT_IS as AS_IT_IS
from ..ab.study import MAIN, MEASURE, Study
from ..ab.text import join_words
from ..ab.verdict import ACTIONS
from ..atomic_write import replace_file
from ..online import run_config as given
from ..online.data.events import Batch
from ..online.data.schema import Schema
from ..online.data.sources import Source, open_source
from ..online.data.validation import check_columns, check_uri
from ..online.metrics.stream import clicks
from ..online.models.model_file import OptimizerSpec
from ..online.monitoring import reject_limit
from ..online.per_event import EventByEvent
from ..statistics.learning_rates import NoLearningRateError
from . import arguments
from .exit_codes import DONE, FAILED, NO_DATA, NO_PACKAGE, NOTHING, USAGE

EXITS = {
    **{code: text for code, text in command.EXITS.items() if code not in (NO_DATA, NOTHING)},
    FAILED: "a run failed, an optimizer diverged at every learning rate, no GAUC could be measured, or more than "
    "--max-rejected was rejected; finished runs are cached",
    USAGE: "the command was not understood, the data is missing or does not fit, or a folder cannot be written to; "
    "nothing was computed",
}
"""What the exit codes of `cadam ab` mean."""
FOLDER = Path("ab")
"""Where each comparison has a folder of its own."""
COUNTING = 10.0
"""Seconds between lines while events are counted."""
SHARED = ("label", "user", "time", "id", "ignore", "schema", "model", "width", "hidden")
"""Options that say of data and model to `cadam run` what they say here."""
SHOWN = {MAIN: "GAUC", "log_loss": "log loss"}
"""What the scoreboard shows."""
NOTES = (
    "GAUC is by impressions. Seeds change the initial weights; the events are the same in every run.",
    "Runs meet the whole stream and are measured after its first part, on which learning rates were chosen with other "
    "seeds.",
    "The confidence sequence is about the mean over blocks of the GAUC within each block, which is another number than "
    "the GAUC of the whole.",
)


class TooMuchRejectedError(ValueError):
    """More of the data cannot be used than may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam ab`."""
    parser.epilog = command.exit_codes(EXITS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.cache_arguments(parser)
    add_study_arguments(parser)
    parser.add_argument(
        "--seeds", type=command.positive, default=5, metavar="N", help="starts of each arm (default: 5)"
    )
    parser.add_argument("--force", action="store_true", help="compute again what is there")
    parser.add_argument("--json", action="store_true", help="print the recommendation and all numbers as JSON alone")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the report, as .html; its numbers and schema go beside it as JSON (default: ab/NAME/report.html)",
    )


def run(options: argparse.Namespace) -> int:
    if not command.can_draw():
        return NO_PACKAGE
    if not command.can_write("ab", cache=options.cache, output=options.output):
        return USAGE
    said = sys.stderr if options.json else sys.stdout  # with --json, standard output is for that alone
    try:
        check_page(options.output)
        with redirect_stdout(said):
            study, asked = experiment(options)
        mark = identity(study, options.seeds)
        output = options.output or FOLDER / f"{given.stem(study.data)}-{mark}" / "report.html"
        schema = Schema(**study.more["schema"])
        check_free(output, mark, schema, _files(study.data))
    except ImportError as error:
        print(f"cadam ab: {error}", file=sys.stderr)
        return NO_PACKAGE
    except (ValueError, OSError, AttributeError) as error:
        print(f"cadam ab: {error}", file=sys.stderr)
        return FAILED if isinstance(error, TooMuchRejectedError) else USAGE
    if not command.can_write("ab", output=output):
        return USAGE
    title = f"{' against '.join(study.arms)} on {study.data}: predict, then learn"
    board = Scoreboard(asked.name, title, study.arms, SHOWN, AS_IT_IS)
    request = Request(replace(asked, again=again(options)), asked.plan("full", options.seeds))
    with redirect_stdout(said):  # what a model prints, too
        try:
            code = command.with_scoreboard([request], board, Cache(options.cache), options.force, options.json)
            numbers = command.as_json(request)
        except NoLearningRateError as error:
            why = f"{error}; compare again with lower ones (--lr)"
            print(
                f"cadam ab: {why if has_gauc(request.results) else no_gauc(study.data, schema.user)}", file=sys.stderr
            )
            return FAILED
    learn = to_learn(options, study, numbers.get("recommendations", ()))
    found = {"identity": mark, "command": again(options), "run": learn, "report": str(output), **numbers}
    text = json.dumps(found, indent=1, allow_nan=False)
    if code == DONE:
        if not _is_schema(beside := output.with_suffix(".schema.json"), schema):
            schema.write(beside)
        written = command.write_page([request], Heading(asked.title), output)
        replace_file(output.with_suffix(".json"), f"{text}\n".encode())
        print(f"\n{written}", file=said)
        if learn:
            print(f"to learn with {' or '.join(learn)} from here on, at that learning rate:", file=said)
            print("\n".join(f"  {line}" for line in learn.values()), file=said)
    if options.json:
        command.print_lines([text])
    return code


def identity(study: Study, seeds: int) -> str:
    """A few letters that differ between any two comparisons: other data, models, settings or seeds."""
    parts = {part.name: getattr(study, part.name) for part in fields(study)}
    return hashlib.sha256(json.dumps([parts, seeds], sort_keys=True, default=str).encode()).hexdigest()[:8]


def check_page(output: Path | None) -> None:
    """That the report is to be a page: its numbers and its schema go beside it, under the same name as JSON."""
    if output is not None and output.suffix.lower() != ".html":
        raise ValueError(f"--output {output}: the report is a page, so its name must end in .html, as in report.html")


def check_free(output: Path, mark: str, schema: Schema, data: Sequence[Path]) -> None:
    """That the report, its numbers and its schema would replace nothing but those of the same comparison."""
    numbers, beside = output.with_suffix(".json"), output.with_suffix(".schema.json")
    read = {path.resolve() for path in data}
    if own := [path for path in (output, numbers, beside) if path.resolve() in read]:
        raise ValueError(f"{own[0]} is the data, and would be replaced by the report: name another --output")
    try:
        same = json.loads(numbers.read_text(encoding="utf-8"))["identity"] == mark
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    taken = [] if same else [path for path in (output, numbers) if path.exists()]
    if beside.exists() and not same and not _is_schema(beside, schema):
        taken.append(beside)
    if taken:
        names = join_words(map(str, taken))
        what = "exists and is not a report" if len(taken) == 1 else "exist and are not reports"
        raise ValueError(f"{names} {what} of this comparison: move what is there, or name another --output")


def _is_schema(path: Path, schema: Schema) -> bool:
    """Whether the file says this schema already; it may say more, for people."""
    try:
        return Schema.read(path) == schema
    except (OSError, ValueError):
        return False


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that define the study."""
    arguments.add_data_arguments(parser)
    arguments.add_model_arguments(parser)
    parser.add_argument(
        "--arms",
        default="adam,cadam",
        metavar="A,B",
        help="optimizers, with options as in cadam,cadam:moments=int8; the first is the baseline",
    )
    parser.add_argument(
        "--lr", default="3e-4,1e-3,3e-3,1e-2,3e-2,1e-1", metavar="X,Y,...", help="learning rates to choose from"
    )
    parser.add_argument(
        "--batch-size", type=command.positive, default=256, metavar="N", help="events a step (default: 256)"
    )
    parser.add_argument(
        "--events", type=command.positive, metavar="N", help="use the first N, in whole batches (default: all)"
    )
    parser.add_argument("--tuning-share", type=float, default=0.2, metavar="X", help="of the stream (default: 0.2)")
    parser.add_argument("--blocks", type=command.positive, default=50, metavar="N", help="blocks of time (default: 50)")
    parser.add_argument(
        "--matters",
        type=float,
        default=Study.matters,
        metavar="X",
        help="a smaller difference of GAUC is of no use: arms within it are equivalent (default: %(default)s)",
    )
    arguments.add_max_rejected_argument(parser, reject_limit.MAX_REJECTED)
    planted = parser.add_argument_group("planted, as further conditions beside the stream as it is")
    planted.add_argument("--change", metavar="FEATURE", help="its values change places at two moments")
    planted.add_argument("--noise", type=float, metavar="X", help="this share of the labels is wrong")
    planted.add_argument("--delay", type=float, metavar="T", help="labels come this much later on average")


def experiment(options: argparse.Namespace) -> tuple[Study, Experiment]:
    """The study that the options ask for. ValueError and the like say what is wrong with them."""
    options.data, options.typed, options.place = given.data_of(options), options.place, None
    if options.data.partition(":")[2] == "-":
        raise ValueError("standard input can be read only once, and an A/B reads its stream many times: use a file")
    # A comma within an option, as in betas=(0.9,0.99), has a number after it.
    arms = tuple(str(OptimizerSpec.of(text)) for text in re.split(r",(?!\s*[-.\d])", options.arms))
    if len(arms) < 2:
        raise ValueError(f"--arms needs two or more optimizers, got {options.arms!r}")
    if twice := [arm for arm, count in Counter(arms).items() if count > 1]:
        raise ValueError(f"--arms needs different optimizers, and has {twice[0]} more than once")
    if len(arms) > len(palette.SERIES):
        raise ValueError(f"--arms takes up to {len(palette.SERIES)} optimizers, got {len(arms)}")
    grid = tuple(dict.fromkeys(_rate(text) for text in options.lr.split(",")))
    if not 0 <= options.matters < math.inf:
        raise ValueError(f"--matters must be 0 or more, and finite, got {options.matters:g}")
    check_uri(options.data)
    asked = given.read(options)
    schema = asked.schema
    planted = _planted(options, schema)
    source = open_source(options.data, schema, batch_size=options.batch_size, patience=None)
    check_columns(source, schema)
    model = asked.build()  # says what is wrong with it
    for arm in arms if options.batch_size == 1 else ():
        how = EventByEvent.of(model, OptimizerSpec.of(arm).build(model, grid[0]), asked.loss)
        if isinstance(how, str):
            print(f"{arm} learns {how}; that is hundreds of times slower than compiled code")
    labelled = Labelled()
    events, reasons, first = _count(source, options.data, labelled, options.events)
    options.left_out = reasons
    if rejected := reasons.total():
        lost = reject_limit.share(rejected, events)
        said = f"{rejected:,} of {events + rejected:,} events ({lost:.1%}) of {options.data} cannot be used"
        cure = reject_limit.cure(reasons, schema)
        if lost > options.max_rejected:
            raise TooMuchRejectedError(
                f"{said}: {reject_limit.reasons(reasons)}; {first}. {cure[:1].upper()}{cure[1:]}"
            )
        print(f"{said} and are left out: {reject_limit.reasons(reasons)}; {first}")
    if options.events is not None:
        events = min(events, -(-options.events // options.batch_size) * options.batch_size)
    shares = {"batch_size": options.batch_size, "tuning_share": options.tuning_share, "blocks": options.blocks}
    labelled.check(options.data, schema.user, runs.Parts.of(events, shares))
    if schema.user is None:
        print("the schema names no user: GAUC is then that of all events together, the AUC")
    rates = f"{len(grid)} learning rates" if len(grid) > 1 else f"a learning rate of {grid[0]:g}"
    print(
        f"{events:,} events. {' and '.join(arms)} run at {rates} on the first {options.tuning_share:.0%}, then on all "
        f"under {options.seeds} seeds. Quicker: --events N, --seeds N, few --lr"
    )
    file = asked.model.rpartition(":")[0]
    more = {
        "schema": schema.settings(),
        **({"model file": _digest([Path(file)])} if file else asked.settings),
        "data": _digest(_files(options.data)),
    }
    study = Study(
        name=f"ab-{hashlib.sha256(f'{asked.model} {options.data}'.encode()).hexdigest()[:8]}",
        data=options.data,
        model=asked.model,
        arms=arms,
        batch_size=options.batch_size,
        grid=grid,
        tuning_share=options.tuning_share,
        blocks=options.blocks,
        events=events,
        planted=planted,
        more=more,
        matters=options.matters,
    )
    seconds = 1e-4 * events * options.seeds * (len(arms) * (1 + len(study.planted)) + 1)
    title = f"{' against '.join(reversed(arms))} on {options.data}"
    shows = f"{events:,} events, predicted by the model {asked.model} and then learnt from."
    return study, Experiment(
        name=study.name,
        title=title,
        shows=shows,
        claim="",
        measure=MEASURE,
        run_specs=partial(_specs, study),
        compute=studies.runs_compute,
        summary=partial(studies.summary, study),
        figures=partial(studies.figures, study),
        weight=studies.length,
        seconds={"quick": seconds, "full": seconds},
        seeds={"quick": 5, "full": 5},
        notes=NOTES,
    )


def _specs(study: Study, plan: Plan, found: Results) -> Sequence[RunSpec]:
    return studies.run_specs(study, plan.seeds, found)


def again(options: argparse.Namespace) -> str:
    """What to type to go on with the study of these options."""
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    named = [action.dest for action in parser._actions if action.dest not in ("help", "place")]
    changed = [name for name in named if getattr(options, name) != parser.get_default(name)]
    words = [
        word
        for name in (*changed, "seeds", "cache", *(["output"] if options.output else []))
        for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
    ]
    return shlex.join(["cadam", "ab", *words])


def to_learn(options: argparse.Namespace, study: Study, recommendations: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By optimizer, the `cadam run` that learns with what is recommended, at its learning rate.

    Where nothing is better than the baseline, that is the baseline and what may be as good. None where runs diverged.
    """
    known = [one for one in recommendations if one["verdict_kind"] != "diverged"]
    best = [one["treatment"] for one in known if one["action"] == ACTIONS["better"]]
    as_good = [one["treatment"] for one in known if one["action"] != ACTIONS["worse"]]
    rates = {name: rate for one in known for name, rate in one["learning_rates_to_use"].items()}
    names = best or [*as_good, *([study.baseline] if known else [])]
    return {name: _run(options, name, rates[name]) for name in names}


def _run(options: argparse.Namespace, optimizer: str, lr: float) -> str:
    """`cadam run` on the same data with the same model."""
    said: dict[str, Any] = {name: getattr(options, name) for name in SHARED}
    own = options.model is not None and ":" in options.model
    said["batch_size"] = None if options.batch_size == arguments.default_batch_size(own) else options.batch_size
    said["max_rejected"] = None if options.max_rejected == reject_limit.MAX_REJECTED else options.max_rejected
    said["optimizer"] = None if optimizer == "CAdam" else optimizer
    said["lr"] = f"{lr:g}"
    words = [options.typed] if options.typed is not None else ["--data", options.data]
    for name, value in said.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(["cadam", "run", *words])


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise ValueError(f"--lr should be numbers, as in 0.01,0.1; got {text!r}") from None
    if not 0 < rate < math.inf:
        raise ValueError(f"--lr: learning rates must be above 0 and finite, got {text!r}")
    return rate


def _planted(options: argparse.Namespace, schema: Schema) -> Mapping[str, Mapping[str, Any]]:
    planted: dict[str, Mapping[str, Any]] = {}
    if options.change is not None:
        sizes = {name: kind.size for name, kind in schema.kinds.items() if kind.size and not kind.length}
        if options.change not in sizes:
            raise ValueError(
                f"--change needs a categorical feature, got {options.change!r}; there are {', '.join(sizes)}"
            )
        moments = [options.blocks // 3, 2 * options.blocks // 3]
        planted[f"with a change of {options.change}"] = {"change": {"feature": options.change, "blocks": moments}}
    if not 0 < options.tuning_share < 1:
        raise ValueError(f"--tuning-share must lie between 0 and 1, got {options.tuning_share:g}")
    if options.noise is not None and not 0 <= options.noise <= 1:
        raise ValueError(f"--noise must lie between 0 and 1, got {options.noise:g}")
    if options.delay is not None and not options.delay > 0:
        raise ValueError(f"--delay must be above 0, got {options.delay:g}")
    if options.noise is not None:
        planted[f"with {options.noise:.0%} of the labels wrong"] = {"noise": options.noise}
    if options.delay is not None:
        planted[f"with labels {options.delay:g} later"] = {"delay": options.delay}
    return planted


def _count(source: Source, uri: str, labelled: Labelled, most: int | None = None) -> tuple[int, Counter[str], str]:
    """How many events the stream has, those that cannot be used by reason, and the first of them in words.

    It is read up to the `most` events that are wanted. ValueError if no event can be used, or if labels are no clicks:
    there is no GAUC of them.
    """
    events, first, said = 0, "", time.monotonic()
    reasons: Counter[str] = Counter()
    for batch in source:
        if most is not None and events >= most:
            break
        if time.monotonic() - said > COUNTING:
            said = time.monotonic()
            print(f"counting events: {events:,} so far; --events N uses the first N alone", flush=True)
        if isinstance(batch, Batch):
            events += 0 if batch.events is None else len(batch.events)
            reasons.update(reject_limit.alike(one.reason) for one in batch.rejected)
            if batch.rejected and not first:
                first = f"the first, {batch.rejected[0].where}: {batch.rejected[0].reason}"
            for given in (batch.events, batch.labels):
                if given is not None and given.labels is not None:
                    clicks(given.labels[~np.isnan(given.labels)], f"GAUC, which decides the A/B on {uri}")
            labelled.note(batch)
            if events + reasons.total() >= reject_limit.FIRST and reasons.total() > events:
                break  # nothing good is to come
    if reasons and not events:
        raise TooMuchRejectedError(f"none of {reasons.total():,} events of {uri} can be used; {first}")
    return events, reasons, first


def _files(uri: str) -> list[Path]:
    """The files of a stream, none if it is not in files."""
    path = Path(uri.partition(":")[2])
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []


def _digest(files: list[Path]) -> str:
    """A hash of the content of files, so that results are computed anew where it changed."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    return total.hexdigest()[:20]
