"""Generation of the tables and figures of the documentation: ``python -m cadam_paper.pages``, run by `make docs`.

The numbers come from the archive of published results, and the command reference from the argument parsers. A page
marks the position of a table::

    <!-- table: NAME -->
    ...
    <!-- end -->

The text between the marks is replaced, and the image files in docs/img are drawn again if their numbers changed.
With ``--check`` nothing is written: the outdated figures and the lines of pages that differ are printed, and the exit
code is 1 if there are any. The last digit of a decimal number may differ by one, because processors round differently.
"""

from __future__ import annotations

import argparse
import difflib
import re
import statistics
import sys
from collections.abc import Callable, Sequence

from cadam.rules.family import FAMILY

from . import (
    catalog,
    claims,
    commands_page,
    controls,
    evidence,
    figure_files,
    guide,
    judged_streams,
    masking_page,
    recorded_tables,
    stream_tables,
)
from .continual import page as continual
from .ctr import study as click_study
from .harness.results import REPEAT_SEEDS, TUNING_SEEDS, Results, RunSpec
from .images import study
from .language_models import page as language_models
from .published import (
    ROOT,
    archive,
    format_interval,
    format_rate,
    load,
    load_full_scale,
    table_header,
    table_row,
)

DECIMAL = re.compile(r"[-+]?\d+\.(\d+)")
"""A decimal number; the group is its fraction."""
MARKED = re.compile(r"^( *)<!-- table: ([\w-]+) -->\n.*?^ *<!-- end -->\n", re.MULTILINE | re.DOTALL)
"""A generated table with its marks; the groups are the indentation and the name of the table."""


# Images --------------------------------------------------------------------------------------------------------

MODELS = ("VGG-16", "ResNet-18", "DenseNet-121")


def strength_table(family: str) -> list[str]:
    """Return the table of accuracy differences at Adam's best learning rate, by condition and strength of the shift.

    A difference is the accuracy of CAdam minus that of Adam, both at the learning rate that is best for Adam.

    Args:
        family: Suffix of the experiments' names that selects the model: "" (VGG-16), "-resnet" or "-densenet".
    """
    columns = ["weakest", "second", "third", "strongest"] if family == "" else ["with change"]
    lines = table_header("condition, rate for both", "without change", *columns, "noise floor")
    for name, figure in evidence.FIGURE_OF.items():
        condition, results = study.CONDITIONS[name], load(f"{figure}{family}").results
        strengths = study.strengths(condition, "vgg" if family == "" else family[1:], "full")
        compared = [study.compare_arms(results, condition, strength) for strength in strengths]
        listed = ", ".join(f"{strength:g}" for strength in strengths if strength)
        rate = format_rate(study.choose_rate(results, condition, "Adam").lr)
        lines.append(
            table_row(
                f"{name} {listed}{condition.unit}; {rate}",
                *(format_interval(c.difference) for c in compared),
                f"±{compared[-1].floor:.2f}",
            )
        )
    return lines


def rate_table() -> list[str]:
    """Return the table of accuracy differences, CAdam minus Adam, at two choices of the learning rate.

    One column has both optimizers at Adam's best rate, the other one has each optimizer at its own best rate.
    """
    lines = table_header("condition; Adam's rate", "both at Adam's rate", "CAdam at its own best rate", "noise floor")
    results = load("tab-image-rates").results
    for condition in study.CONDITIONS.values():
        best = study.own_rates(results, condition)
        adams = format_rate(best["Adam"])
        both = study.compare_at_rates(results, condition, dict.fromkeys(study.ARMS, best["Adam"]))
        at_own_rates = study.compare_at_rates(results, condition, best)
        lines.append(
            table_row(
                f"{condition.label(condition.reference)}; {adams}",
                format_interval(both.difference),
                f"also {adams}"
                if best["CAdam"] == best["Adam"]
                else f"{format_interval(at_own_rates.difference)} at {format_rate(best['CAdam'])}",
                f"±{both.floor:.2f}",
            )
        )
    return lines


def ablation_table() -> list[str]:
    """Return the table of optimizers with and without confidence, at the rate that is best without confidence."""
    lines = table_header("condition", "pair; rate", "with", "without", "difference", "the paper's")
    results = load("tab-ablation-images").results
    for condition in study.CONDITIONS.values():
        for pair in study.PAIRS:
            comparison = study.compare_arms(results, condition, condition.reference, pair)
            without, confident = study.PAPER[condition.name, pair[1]]
            lines.append(
                table_row(
                    condition.label(condition.reference) if pair == study.PAIRS[0] else "",
                    f"{', '.join(pair)}; {format_rate(study.choose_rate(results, condition, pair[1]).lr)}",
                    f"{comparison.mean:.2f}",
                    f"{comparison.baseline_mean:.2f}",
                    format_interval(comparison.difference),
                    f"{confident - without:+.2f}",
                )
            )
    return lines


def run_table() -> list[str]:
    """Return the table of archived image runs by model and condition, with the number of missing runs.

    Missing runs of control arms are not counted, because only those of the next condition are known.
    """
    results = Results(archive().study("images").results())
    missing: set[RunSpec] = set()
    for name, location in catalog.EXPERIMENTS.items():
        if location.startswith("cadam_paper.images") and not name.endswith("-controls"):
            missing |= set(load_full_scale(name).missing)
    lines = table_header("model", "condition", "learning-rate runs", "runs", "A/A", "GPU minutes", "missing runs")
    for model in MODELS:
        for condition in ("clean", *study.CONDITIONS):
            archived = Results([r for r in results if _matches(r.spec, model, condition)])
            absent = [spec for spec in missing if _matches(spec, model, condition)]
            tuning = sum(TUNING_SEEDS <= spec.seed < REPEAT_SEEDS for spec in absent)
            parts = [f"{tuning} learning-rate runs, then the runs at these rates"] if tuning else []
            parts += [f"{len(absent) - tuning} runs"] if len(absent) > tuning else []
            lines.append(
                table_row(
                    model,
                    "without change" if condition == "clean" else condition,
                    *(str(len(kind())) for kind in (archived.tuning, archived.tests, archived.repeats)),
                    f"{archived.seconds / 60:.1f}",
                    " and ".join(parts) or "none",
                )
            )
    return lines


def _matches(spec: RunSpec, model: str, condition: str) -> bool:
    return spec.model == model and spec.condition.split()[0] == condition


# Clicks --------------------------------------------------------------------------------------------------------


def click_table() -> list[str]:
    """Return the table of test AUCs on generated clicks without drift.

    There is a row for each optimizer and a column for each model, and each pair uses its own best learning rate.
    """
    models, table = click_study.MODELS, click_study.TABLE
    lines = table_header("optimizer", *models, "mean", "the paper's mean, on Criteo")
    for name, optimizers in (("tab-criteo", click_study.OPTIMIZERS), ("tab-ablation-criteo", click_study.SGDM)):
        results = load(name).results
        rates = click_study.choose_rates(results, optimizers, table)
        for optimizer in sorted(optimizers):
            aucs = [click_study.by_seed(results.tests(), optimizer, rates, table, (m,)).values() for m in models]
            means = [statistics.fmean(values) for values in aucs]
            paper = click_study.PAPER.get(optimizer, (click_study.PAPER_ABLATION.get(optimizer, 0.0),))
            at = [f"{mean:.2f}, {format_rate(rates[m, optimizer])}" for m, mean in zip(models, means, strict=True)]
            lines.append(table_row(optimizer, *at, f"{statistics.fmean(means):.2f}", f"{statistics.fmean(paper):.2f}"))
    return lines


# Optimizers ----------------------------------------------------------------------------------------------------


def optimizer_table() -> list[str]:
    """Return the table of all optimizers with the default of the learning rate and the paper of the rule."""
    lines = table_header("with confidence", "without", "rule", "default `lr`", "paper")
    for member in FAMILY:
        links = (f"[`{name}`](#cadam.optim.classes.{name})" for name in (f"C{member.name}", member.name))
        text = f"{member.summary} {member.rule.doc}"
        description = re.split(r"\.\s| \(http", text.strip())[0].strip().rstrip(".").replace("``", "`")
        paper = re.search(r"https://(?:arxiv|papers\.nips|proceedings)[^)\s]+", text)
        if paper is None:
            raise ValueError(f"the rule of {member.name} names no paper")
        lines.append(table_row(*links, description, format_rate(member.all_defaults["lr"]), f"[paper]({paper[0]})"))
    return lines


# All pages ---------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], list[str]]] = {
    "images-run": run_table,
    "images-strengths": lambda: strength_table(""),
    "images-resnet": lambda: strength_table("-resnet"),
    "images-densenet": lambda: strength_table("-densenet"),
    "images-rates": rate_table,
    "images-ablation": ablation_table,
    "clicks": click_table,
    "language-models-answer": language_models.answer,
    "language-models": language_models.result_table,
    "language-models-high-rate": language_models.high_rate,
    "language-models-speedup": language_models.speedup_table,
    "continual-answer": continual.answer,
    "continual": continual.result_table,
    "masking-answer": masking_page.answer,
    "masking": masking_page.harm_table,
    "masking-rows": masking_page.row_table,
    "streams-answer": stream_tables.answer,
    "streams-verdicts": judged_streams.verdict_table,
    "streams-verdicts-full": judged_streams.full_table,
    "streams-ab": stream_tables.comparison_table,
    "streams-rates": stream_tables.rate_table,
    "streams-tolerances": stream_tables.tolerance_table,
    "streams-intervals": stream_tables.interval_table,
    "evidence-guide": guide.table,
    "evidence-answer": evidence.answer,
    "evidence-switch": evidence.switch_table,
    "evidence-advice": evidence.switch_legend,
    "readme-switch": evidence.switch_summary,
    "readme-claims": claims.readme_line,
    "evidence-when": evidence.gain_by_epoch,
    "evidence-ties": evidence.gain_at_common_rates,
    "evidence-others": evidence.other_optimizers,
    "evidence-skipped": evidence.masked_share,
    "evidence-rates": evidence.rate_table,
    "evidence-floors": evidence.noise_floors,
    "evidence-explanations": evidence.rates_of_paper_margins,
    "evidence-findings": evidence.finding_table,
    "evidence-controls": controls.table,
    "evidence-controls-answer": controls.answer,
    "evidence-controls-missing": controls.missing,
    "evidence-claims": claims.table,
    "claims-count": claims.count_verdicts,
    "evidence-costs": evidence.cost_table,
    "images-cost": lambda: evidence.study_cost("images"),
    "clicks-cost": lambda: evidence.study_cost("ctr"),
    "language-models-cost": lambda: evidence.study_cost("language-models"),
    "continual-cost": lambda: evidence.study_cost("continual"),
    "masking-tables": recorded_tables.confidence_for_tables,
    "masking-tables-cost": recorded_tables.confidence_for_tables_cost,
    "streams-defaults": recorded_tables.defaults,
    "streams-defaults-cost": recorded_tables.defaults_cost,
    "masking-cost": lambda: evidence.study_cost("masking"),
    "streams-cost": lambda: evidence.study_cost(",".join(f"ab-{name}" for name in stream_tables.STREAMS)),
    "commands": commands_page.commands,
    "optimizers": optimizer_table,
}
"""The functions that return the lines of each table, by the name in its mark."""
PAGES = (
    "README.md",
    "docs/streams.md",
    "docs/images.md",
    "docs/ctr.md",
    "docs/language_models.md",
    "docs/continual.md",
    "docs/mechanism.md",
    "docs/evidence.md",
    "docs/rates.md",
    "docs/claims.md",
    "docs/paper.md",
    "docs/cli.md",
    "docs/reference.md",
)


def update_tables(text: str) -> str:
    """Return the text of a page with all of its tables generated again."""

    def table(match: re.Match[str]) -> str:
        indent, name = match.groups()
        lines = [f"<!-- table: {name} -->", *TABLES[name](), "<!-- end -->"]
        return "".join(f"{indent}{line}\n" for line in lines)

    return MARKED.sub(table, text)


def _changed_lines(before: str, after: str) -> list[str]:
    """Return the lines of a page that differ from the generated ones, as in a diff without context."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "page", "generated", lineterm="", n=0)
    return list(lines)


def agree(first: str, second: str) -> bool:
    """Whether two texts are equal, except that decimal numbers may differ by one in their last digit."""
    numbers = zip(DECIMAL.finditer(first), DECIMAL.finditer(second), strict=False)
    return DECIMAL.sub(_places, first) == DECIMAL.sub(_places, second) and all(
        abs(float(a[0]) - float(b[0])) < 1.5 * 10.0 ** -len(a[1]) for a, b in numbers
    )


def _places(number: re.Match[str]) -> str:
    """Replace the digits of a decimal number, so that only the number of its decimal places remains."""
    return f"#.{'#' * len(number[1])}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Update or check all pages and figures, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cadam_paper.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; print the pages that are out of date")
    check, code = parser.parse_args(arguments).check, 0
    for path in (ROOT / page for page in PAGES):
        before = path.read_text("utf-8")
        after = update_tables(before)
        if after == before or (check and agree(before, after)):
            continue
        if check:
            print(f"{path.relative_to(ROOT)}: its tables differ from the archive; run `make docs`", file=sys.stderr)
            print(*_changed_lines(before, after), sep="\n", file=sys.stderr)
            code = 1
        else:
            path.write_text(after, "utf-8")
            print(f"{path.relative_to(ROOT)}: tables updated")
    for figure in figure_files.FIGURES:
        if figure_files.is_current(figure):
            continue
        if check:
            print(f"{figure}: its numbers or labels have changed; run `make docs`", file=sys.stderr)
            code = 1
        else:
            figure_files.draw(figure)
            print(f"{figure}: figure updated")
    return code


if __name__ == "__main__":
    sys.exit(main())
