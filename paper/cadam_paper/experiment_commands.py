"""The commands of the paper: list, reproduce, report, archive, demo and criteo."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cadam.ab.results import Result, Results
from cadam.cli.exit_codes import DONE, FAILED, INTERRUPTED, NO_DATA, NO_PACKAGE, NOTHING, USAGE
from cadam.statistics.learning_rates import NoLearningRateError

from . import catalog
from .harness import command, console, report, runner
from .harness.archive import NEEDS, Archive, DamagedResultsError
from .harness.cache import Cache, DamagedResultError
from .harness.experiment import Data, Experiment, Plan, Scale
from .harness.scoreboard import Scoreboard

SCALES: tuple[Scale, ...] = ("quick", "full")
HEADING = report.Heading(
    "CAdam: the paper's claims, measured",
    (
        "CAdam moves a weight only where its momentum and its current gradient agree in sign. This is what was "
        "measured, for better or worse.",
    ),
    (
        "The paper: “CAdam: Confidence-Based Optimization for Online Learning” by Shaowen Wang, Anan Liu, Jian Xiao, "
        "Huan Liu, Yuekui Yang, Cong Xu, Qianqian Pu, Suncong Zheng, Di Wang, Jie Jiang, Wei Zhang and Jian Li.",
    ),
)


def _add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = command.EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.cache_arguments(parser)
    parser.add_argument(
        "--archive",
        type=Path,
        default=Path(os.environ.get("CADAM_ARCHIVE", "results")),
        metavar="FOLDER",
        help="where published results lie, which need not be computed again (default: $CADAM_ARCHIVE, else results)",
    )


def _cache(options: argparse.Namespace) -> Cache:
    """What was computed: here, and what is published."""
    folder: Path = options.archive
    if find_spec("pyarrow") is None and any(folder.glob("*.parquet")):
        print(f"the published results in {folder} are not used: {NEEDS}", file=sys.stderr)
        return Cache(options.cache)
    return Cache(options.cache, Archive(folder))


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shared_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shared_arguments(parser)
    parser.add_argument("names", nargs="+", metavar="NAME", help="names as `cadam list` shows them, or all")
    _scale_arguments(parser, default="--quick")
    parser.add_argument("--data", type=Path, metavar="PATH", help="your own data, such as Criteo's train.txt")
    parser.add_argument("--rows", type=command.positive, metavar="N", help="this many rows of the data instead of all")
    parser.add_argument("--force", action="store_true", help="compute again what is there")
    parser.add_argument("--jobs", type=command.positive, metavar="N", help="processes (default: as many as pay)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print verdicts and tables as JSON, and nothing else")
    output.add_argument("--quiet", action="store_true", help="print only what goes wrong")


def _scale_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    scale = parser.add_mutually_exclusive_group()
    quick, full = f"fewer seeds (default: {default})", "as many seeds as it takes"
    scale.add_argument("--quick", dest="scale", action="store_const", const="quick", help=quick)
    scale.add_argument("--full", dest="scale", action="store_const", const="full", help=full)
    parser.add_argument("--seeds", type=command.positive, metavar="N", help="this many seeds instead")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shared_arguments(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to report (default: all that was asked for)")
    _scale_arguments(parser, default="what was last run")
    command.output_argument(parser)
    parser.add_argument("--title", metavar="TEXT", help="of the page (default: that of the experiment if it is one)")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="also write each figure there, as PNG")


def add_archive_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shared_arguments(parser)
    parser.add_argument("names", nargs="+", metavar="NAME", help="names as `cadam list` shows them")
    _scale_arguments(parser, default="what was last run")
    parser.add_argument("--dirty", action="store_true", help="also results of code that no commit has")


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shared_arguments(parser)
    command.output_argument(parser)
    parser.add_argument("--force", action="store_true", help="compute again what is there")


# list ----------------------------------------------------------------------------------------------------------


def list_experiments(options: argparse.Namespace) -> int:
    cache = _cache(options)
    rows: list[dict[str, Any]] = []
    for experiment in catalog.select(["all"]):
        request = _known(cache, experiment, _last(cache, experiment) or experiment.plan("quick"))
        rows.append(
            {
                "name": experiment.name,
                "title": experiment.title,
                "shows": experiment.shows,
                "data": {scale: _in_words(experiment.needed(scale)) for scale in SCALES},
                "cuda": list(experiment.cuda),
                "state": console.state(experiment, request, _published(request, cache)),
                "seconds": dict(experiment.seconds),
            }
        )
    if options.json:
        command.print_lines([json.dumps(rows, indent=1)])
        return DONE
    width = max(len(row["name"]) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row['name']:{width}}  {row['title']}: {row['shows']}")
        lines.append(f"{'':{width}}  {row['state']}")
        for scale in SCALES:
            needs = f"needs {data}" if (data := row["data"][scale]) else "needs no data"
            device = " on a CUDA device" if scale in row["cuda"] else ""
            lines.append(f"{'':{width}}  --{scale}: about {report.duration(row['seconds'][scale])}{device}, {needs}")
        lines.append("")
    command.print_lines([*lines, "cadam reproduce NAME computes one, cadam report shows what there is."])
    return DONE


def _in_words(data: Data | None) -> str | None:
    return None if data is None else f"{data.name} (from {data.source}, {data.size})"


def _last(cache: Cache, experiment: Experiment, scale: Scale | None = None) -> Plan | None:
    """The plan that was last asked for, if one was. One that cannot be read is said, and taken for a quick one."""
    try:
        return cache.last_plan(experiment, scale)
    except (DamagedResultError, DamagedResultsError) as error:
        print(f"damaged: {error}", file=sys.stderr)
        return experiment.plan(scale or "quick")


def _meant(cache: Cache, experiment: Experiment, options: argparse.Namespace) -> Plan:
    """The plan that --quick, --full and --seeds mean: the last of that scale, with these seeds; or the last."""
    if not options.scale and not options.seeds:
        return _last(cache, experiment) or experiment.plan("quick")
    plan = experiment.plan(options.scale or "quick", options.seeds)
    return replace(_last(cache, experiment, plan.scale) or plan, seeds=plan.seeds)


def _known(cache: Cache, experiment: Experiment, plan: Plan) -> runner.Request:
    """What there is of an experiment. Computes nothing."""
    try:
        if experiment.unread is not None and (advice := experiment.unread(plan)):
            return runner.Request(experiment, plan, unknown=advice)
        return runner.read(cache, experiment, plan, console.say_damaged)
    except (OSError, ValueError, RuntimeError, ImportError) as error:  # such as the user's own data, which is gone
        return runner.Request(experiment, plan, unknown=str(error))


# reproduce -----------------------------------------------------------------------------------------------------


def reproduce(options: argparse.Namespace) -> int:
    try:
        experiments = _selected(options.names, options.scale or "quick")
    except catalog.UnknownExperimentError as error:
        print(f"cadam reproduce: {error}", file=sys.stderr)
        return USAGE
    fixed = [e.name for e in experiments if not e.takes_data]
    if fixed and (options.data or options.rows):
        print(
            f"cadam reproduce: --data and --rows are not for {', '.join(fixed)}, whose data is given", file=sys.stderr
        )
        return USAGE
    if not command.can_write("reproduce", cache=options.cache):
        return USAGE
    own = "" if options.data is None else str(options.data.absolute())
    plans = [e.plan(options.scale or "quick", options.seeds, own, options.rows) for e in experiments]
    requests = [runner.Request(e, plan) for e, plan in zip(experiments, plans, strict=True)]
    lacking = [r for r in requests if _lacking(r) or _lacking_packages(r.experiment)]
    new = [r for r in lacking if not _all_known(r, _cache(options), options.force)]
    if packages := list(dict.fromkeys(name for request in new for name in _lacking_packages(request.experiment))):
        print(f"cadam reproduce: {', '.join(packages)} missing: pip install {' '.join(packages)}", file=sys.stderr)
        return NO_PACKAGE
    missing = [lack for request in new if (lack := _lacking_data(request.experiment, request.plan.scale))]
    if names := [r.experiment.name for r in new if _lacking_device(r.experiment, r.plan.scale)]:
        missing.append(f"{', '.join(names)}: {_NO_CUDA}")
    if own and not options.data.exists():
        missing.append(f"there is nothing at {own}")
    if missing:
        print("\n".join(dict.fromkeys(missing)), file=sys.stderr)
        return NO_DATA
    if own or options.rows:
        try:
            requests[0].experiment.run_specs(requests[0].plan, Results())  # reads the data, if that was not done yet
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            print(f"cadam reproduce: {error}", file=sys.stderr)
            return NO_DATA if own else USAGE
        except KeyboardInterrupt:
            print("interrupted: what is read is kept, the same command goes on from there", file=sys.stderr)
            return INTERRUPTED
    show = console.live if console.on_terminal() else console.plain
    try:
        with (console.silent if options.quiet or options.json else show)(requests) as tell:
            code = command.run(requests, _cache(options), options.jobs, options.force, tell)
    except PermissionError as error:
        print(f"cadam reproduce: the cache cannot be written to: {error}", file=sys.stderr)
        return FAILED
    except NoLearningRateError as error:
        print(f"cadam reproduce: {error}; what is done is cached", file=sys.stderr)
        return FAILED
    if options.json:
        command.print_lines([json.dumps([command.as_json(request) for request in requests], indent=1, allow_nan=False)])
    elif not options.quiet:
        lines = [line for request in requests for line in command.summary_lines(request, options.cache)]
        lines += ["", *_from_archive(requests, _cache(options)), "All numbers and figures: cadam report, or --json."]
        command.print_lines(lines)
    return code


def _from_archive(requests: Sequence[runner.Request], cache: Cache) -> list[str]:
    """How many of the results were not computed here."""
    lines = []
    for request in requests:
        if published := _published(request, cache):
            counted = f"{published} of {len(request.results)} results"
            lines.append(f"{request.experiment.name}: {counted} are published ones; --force computes them here.")
    return lines


def _published(request: runner.Request, cache: Cache) -> int:
    """How many results are there that were not computed here."""
    return sum(not cache.path(request.experiment, result.spec).exists() for result in request.results)


_NO_CUDA = "a CUDA device is needed at this scale, and torch finds none; --quick runs on the CPU"


def _lacking(request: runner.Request) -> bool:
    """Is there something that cannot be computed without, and is not there?"""
    asked = request.experiment, request.plan.scale
    return _lacking_data(*asked) is not None or _lacking_device(*asked)


def _lacking_data(experiment: Experiment, scale: Scale) -> str | None:
    """What data has to be fetched first."""
    needed = experiment.needed(scale)
    return None if needed is None else needed.missing()


def _lacking_device(experiment: Experiment, scale: Scale) -> bool:
    import torch

    return scale in experiment.cuda and not torch.cuda.is_available()


def _lacking_packages(experiment: Experiment) -> list[str]:
    """The packages that have to be installed first."""
    return [name for name in experiment.packages if find_spec(name) is None]


def _all_known(request: runner.Request, cache: Cache, force: bool) -> bool:
    """Whether there is nothing left to compute, as far as that can be told without reading through data first."""
    experiment, plan = request.experiment, request.plan
    if force:
        return False
    try:
        unread = experiment.unread is not None and experiment.unread(plan) is not None
        return not unread and runner.read(cache, experiment, plan).complete
    except (OSError, ValueError):  # the user's own data, which is not there or cannot be read
        return False


def _selected(names: Sequence[str], scale: Scale) -> list[Experiment]:
    """The experiments that are named. `all` are those whose data and device are there; what is left out is said."""
    kept, left_out = [], dict[str, list[str]]()
    for experiment in catalog.select(names):
        advice = _lacking_data(experiment, scale) or (_NO_CUDA if _lacking_device(experiment, scale) else "")
        if experiment.name not in names and advice:
            left_out.setdefault(advice, []).append(experiment.name)
        else:
            kept.append(experiment)
    for advice, experiments in left_out.items():
        print(f"left out of all: {', '.join(experiments)}: {advice}", file=sys.stderr)
    return kept


# report --------------------------------------------------------------------------------------------------------


def write_report(options: argparse.Namespace) -> int:
    try:
        experiments = catalog.select(options.names or ["all"])
    except catalog.UnknownExperimentError as error:
        print(f"cadam report: {error}", file=sys.stderr)
        return USAGE
    if not command.can_draw():
        return NO_PACKAGE
    if not command.can_write("report", output=options.output, images=options.images):
        return USAGE
    cache = _cache(options)
    requests = _to_report(cache, experiments, options)
    unknown = [f"{request.experiment.name}: {request.unknown}" for request in requests if request.unknown]
    if unknown:
        print("\n".join(unknown), file=sys.stderr)
    if unknown and not any(request.results for request in requests):
        return NOTHING
    if not any(request.results for request in requests):
        of = f" of {', '.join(request.experiment.name for request in requests)}" if requests else ""
        runs = [command.command_of(request, options.cache) for request in requests] or ["cadam reproduce NAME"]
        places = f"neither {options.cache} nor {options.archive} has"
        print(f"{places} results{of}: run `{'; '.join(runs)}`", file=sys.stderr)
        return NOTHING
    one = requests[0].experiment.title if len(requests) == 1 else HEADING.title
    print(command.write_page(requests, replace(HEADING, title=options.title or one), options.output))
    if options.images:
        _write_images(requests, options.images)
    for request in (r for r in requests if r.missing):
        lacking = f"{request.experiment.name}: {len(request.missing)} specs failed or were not run"
        print(f"{lacking}: {command.command_of(request, options.cache)}", file=sys.stderr)
    return DONE if all(request.complete for request in requests) else FAILED


def _to_report(cache: Cache, experiments: Sequence[Experiment], options: argparse.Namespace) -> list[runner.Request]:
    """What is named; without names, what was asked for at some time. One that only shares specs with it was not."""
    requests = []
    for experiment in experiments:
        last = _last(cache, experiment)
        if last is None and not options.names:
            continue
        plan = _meant(cache, experiment, options)
        request = _known(cache, experiment, plan)
        if request.results or request.unknown or options.names or plan == last:
            requests.append(request)
    return requests


def _write_images(requests: Sequence[runner.Request], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for request in (r for r in requests if r.complete):
        for number, figure in enumerate(report.draw(request.experiment, request).values(), 1):
            path = folder / f"{request.experiment.name}-{number}.png"
            figure.savefig(path, dpi=110)
            print(f"figure: {path}")


# archive -------------------------------------------------------------------------------------------------------


def archive(options: argparse.Namespace) -> int:
    try:
        experiments = catalog.select(options.names)
    except catalog.UnknownExperimentError as error:
        print(f"cadam archive: {error}", file=sys.stderr)
        return USAGE
    if find_spec("pyarrow") is None:
        print(f"cadam archive: {NEEDS}", file=sys.stderr)
        return NO_PACKAGE
    if not command.can_write("archive", archive=options.archive):
        return USAGE
    published, code = Archive(options.archive), DONE
    for experiment in experiments:
        cache = Cache(options.cache, published, any_versions=True)
        plan = _meant(cache, experiment, options)
        request = _known(cache, experiment, plan)
        new = [r for r in request.results if _is_new(published.find(experiment, r.spec), r)]
        unknown = sum(r.provenance.commit is None or bool(r.provenance.dirty) for r in new)
        if unknown and not options.dirty:
            print(
                f"cadam archive: {experiment.name}: {unknown} of {len(new)} new results were computed by code that no "
                "commit has; commit it and run with --force again, or archive them all the same with --dirty",
                file=sys.stderr,
            )
            code = FAILED
            continue
        if new:
            published.add(experiment, new)
        if request.results:
            published.remember(experiment, plan)
        missing = f", {len(request.missing)} of the plan are missing: " if request.missing else ""
        go_on = command.command_of(request, options.cache) if request.missing else ""
        print(f"{experiment.name}: {len(new)} results archived{missing}{go_on}")
        code = FAILED if request.missing and not new else code
    return code


def _is_new(published: Result | None, result: Result) -> bool:
    """Is a result not in the archive, or other than there? Then it supersedes what is there."""
    if published is None:
        return True
    before, after = published.outcome, result.outcome
    return not (
        before.metrics.keys() == after.metrics.keys()
        and before.curves.keys() == after.curves.keys()
        and np.array_equal(
            list(before.metrics.values()), [after.metrics[name] for name in before.metrics], equal_nan=True
        )
        and all(np.array_equal(before.curves[name], after.curves[name], equal_nan=True) for name in before.curves)
    )


# demo ----------------------------------------------------------------------------------------------------------


def demo(options: argparse.Namespace) -> int:
    from .demo import BOARD, NAMES

    if not command.can_draw():
        return NO_PACKAGE
    if not command.can_write("demo", cache=options.cache, output=options.output):
        return USAGE
    print(
        "Adam and CAdam, first on a minimum that moves, then on clicks made on the fly. No data, no network, CPU only."
    )
    requests = [runner.Request(e, e.plan("quick")) for e in catalog.select(NAMES)]
    code = command.with_scoreboard(requests, Scoreboard(*BOARD), Cache(options.cache), options.force)
    if code == DONE:
        print(f"\n{command.write_page(requests, HEADING, options.output)}")
    return code
