"""Tables of the documentation, from the archive and the command line: ``python -m cadam_paper.pages``, by `make docs`.

A page marks where a table goes::

    <!-- table: NAME -->
    ...
    <!-- end -->

What stands between the marks is replaced, and the figures of docs/evidence.md are drawn anew. ``--check`` only says
what is out of date, with exit code 1.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Sequence

from cadam.ab.results import REPEAT_SEEDS, TUNING_SEEDS, Results, RunSpec

from . import catalog, claims, commands_page, evidence, stream_tables
from .ctr import study as click_study
from .images import study
from .published import ROOT, archive, head, in_brackets, line, part, request, short

MARKED = re.compile(r"^( *)<!-- table: ([\w-]+) -->\n.*?^ *<!-- end -->\n", re.MULTILINE | re.DOTALL)


# Images --------------------------------------------------------------------------------------------------------

MODELS = ("VGG-16", "ResNet-18", "DenseNet-121")


def strengths(family: str) -> list[str]:
    """CAdam minus Adam at Adam's rate, at each strength of each condition."""
    columns = ["weakest", "second", "third", "strongest"] if family == "" else ["with it"]
    lines = head("condition, rate for both", "without change", *columns, "noise floor")
    for name, figure in evidence.FIGURE_OF.items():
        condition, results = study.CONDITIONS[name], request(f"{figure}{family}").results
        found = study.strengths(condition, "vgg" if family == "" else family[1:], "full")
        compared = [study.compared(results, condition, strength) for strength in found]
        listed = ", ".join(f"{strength:g}" for strength in found if strength)
        rate = short(study.choice(results, condition, "Adam").lr)
        lines.append(
            line(
                f"{name} {listed}{condition.unit}; {rate}",
                *(in_brackets(c.difference) for c in compared),
                f"±{compared[-1].floor:.2f}",
            )
        )
    return lines


def rates() -> list[str]:
    """CAdam minus Adam, with both at Adam's rate and with each at its own."""
    lines = head("condition; Adam's rate", "both at it", "CAdam at its own", "noise floor")
    results = request("tab-image-rates").results
    for condition in study.CONDITIONS.values():
        own = study.own_rates(results, condition)
        adams = short(own["Adam"])
        both = study.compared_at(results, condition, dict.fromkeys(study.ARMS, own["Adam"]))
        each = study.compared_at(results, condition, own)
        lines.append(
            line(
                f"{condition.label(condition.reference)}; {adams}",
                in_brackets(both.difference),
                f"the same, {adams}"
                if own["CAdam"] == own["Adam"]
                else f"{in_brackets(each.difference)} at {short(own['CAdam'])}",
                f"±{both.floor:.2f}",
            )
        )
    return lines


def ablation() -> list[str]:
    """Each pair with and without confidence, at the rate that is best without."""
    lines = head("condition", "pair; rate", "with", "without", "difference", "the paper's")
    results = request("tab-ablation-images").results
    for condition in study.CONDITIONS.values():
        for pair in study.PAIRS:
            found = study.compared(results, condition, condition.reference, pair)
            without, confident = study.PAPER[condition.name, pair[1]]
            lines.append(
                line(
                    condition.label(condition.reference) if pair == study.PAIRS[0] else "",
                    f"{', '.join(pair)}; {short(study.choice(results, condition, pair[1]).lr)}",
                    f"{found.mean:.2f}",
                    f"{found.baseline_mean:.2f}",
                    in_brackets(found.difference),
                    f"{confident - without:+.2f}",
                )
            )
    return lines


def what_was_run() -> list[str]:
    """The archived runs of the image study by model and condition, and what its experiments lack."""
    results = Results(archive().study("images").results())
    missing: set[RunSpec] = set()
    for name, place in catalog.EXPERIMENTS.items():
        if place.startswith("cadam_paper.images"):
            missing |= set(part(name).missing)
    lines = head("model", "condition", "learning-rate runs", "runs", "A/A", "GPU minutes", "lacking of the plan")
    for model in MODELS:
        for condition in ("clean", *study.CONDITIONS):
            there = Results([r for r in results if _is_of(r.spec, model, condition)])
            lacking = [spec for spec in missing if _is_of(spec, model, condition)]
            tuning = sum(TUNING_SEEDS <= spec.seed < REPEAT_SEEDS for spec in lacking)
            parts = [f"{tuning} learning-rate runs, then the runs at these rates"] if tuning else []
            parts += [f"{len(lacking) - tuning} runs"] if len(lacking) > tuning else []
            lines.append(
                line(
                    model,
                    "without change" if condition == "clean" else condition,
                    *(str(len(kind())) for kind in (there.tuning, there.tests, there.repeats)),
                    f"{there.seconds / 60:.1f}",
                    " and ".join(parts) or "nothing",
                )
            )
    return lines


def _is_of(spec: RunSpec, model: str, condition: str) -> bool:
    return spec.model == model and spec.condition.split()[0] == condition


# Clicks --------------------------------------------------------------------------------------------------------


def clicks() -> list[str]:
    """The AUC of every optimizer on every model, at its best rate on generated clicks without drift."""
    models, table = click_study.MODELS, click_study.TABLE
    lines = head("optimizer", *models, "mean", "the paper's mean, on Criteo")
    for name, optimizers in (("tab-criteo", click_study.OPTIMIZERS), ("tab-ablation-criteo", click_study.SGDM)):
        results = request(name).results
        rates = click_study.chosen(results, optimizers, table)
        for optimizer in sorted(optimizers):
            found = [click_study.by_seed(results.tests(), optimizer, rates, table, (m,)).values() for m in models]
            means = [statistics.fmean(values) for values in found]
            paper = click_study.PAPER.get(optimizer, (click_study.PAPER_ABLATION.get(optimizer, 0.0),))
            at = [f"{mean:.2f}, {short(rates[m, optimizer])}" for m, mean in zip(models, means, strict=True)]
            lines.append(line(optimizer, *at, f"{statistics.fmean(means):.2f}", f"{statistics.fmean(paper):.2f}"))
    return lines


# Pages ---------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], list[str]]] = {
    "images-run": what_was_run,
    "images-strengths": lambda: strengths(""),
    "images-resnet": lambda: strengths("-resnet"),
    "images-densenet": lambda: strengths("-densenet"),
    "images-rates": rates,
    "images-ablation": ablation,
    "clicks": clicks,
    "streams-answer": stream_tables.answer,
    "streams-ab": stream_tables.comparisons,
    "streams-rates": stream_tables.rates,
    "streams-tolerances": stream_tables.tolerances,
    "streams-intervals": stream_tables.intervals,
    "evidence-answer": evidence.answer,
    "evidence-switch": evidence.switch,
    "evidence-advice": evidence.advice,
    "evidence-when": evidence.when,
    "evidence-ties": evidence.ties,
    "evidence-others": evidence.others,
    "evidence-skipped": evidence.skipped,
    "evidence-rates": evidence.rate_table,
    "evidence-floors": evidence.floors,
    "evidence-explanations": evidence.explanations,
    "evidence-findings": evidence.all_findings,
    "evidence-claims": claims.table,
    "evidence-costs": evidence.costs,
    "commands": commands_page.commands,
}
PAGES = ("README.md", "docs/streams.md", "docs/images.md", "docs/ctr.md", "docs/evidence.md", "docs/cli.md")


def current(text: str) -> str:
    """A page with its tables as the archive has them."""

    def table(found: re.Match[str]) -> str:
        indent, name = found.groups()
        lines = [f"<!-- table: {name} -->", *TABLES[name](), "<!-- end -->"]
        return "".join(f"{indent}{line}\n" for line in lines)

    return MARKED.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cadam_paper.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and say which pages are out of date")
    check, code = parser.parse_args(arguments).check, 0
    for path in (ROOT / page for page in PAGES):
        before = path.read_text()
        after = current(before)
        if after == before:
            continue
        if check:
            print(f"{path.relative_to(ROOT)}: its tables are not those of the archive: make docs", file=sys.stderr)
            code = 1
        else:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)}: tables made anew")
    for figure in evidence.FIGURES:
        if evidence.is_current(figure):
            continue
        if check:
            print(f"{figure}: drawn from other numbers than those of the archive: make docs", file=sys.stderr)
            code = 1
        else:
            evidence.draw(figure)
            print(f"{figure}: drawn anew")
    return code


if __name__ == "__main__":
    sys.exit(main())
