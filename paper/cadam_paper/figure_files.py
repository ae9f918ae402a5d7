"""The image files of the documentation. `pages` draws a file again if its numbers or labels have changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import partial

from cadam.ab.report import figures, palette

from . import masking_page, mechanism
from .continual import page as continual
from .evidence import (
    CLICK_CURVES,
    click_pairs,
    finding_table,
    forest,
    image_pair_numbers,
    pair_numbers,
    rate_figure,
)
from .language_models import page as language_models
from .pictures import PICTURES, Picture
from .published import ROOT


def _masking_numbers() -> list[str]:
    return [*masking_page.answer(), *masking_page.harm_table()]


def _continual_numbers() -> list[str]:
    return [*continual.answer(), *continual.result_table()]


NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[+-]?\d+)?")
"""A decimal number. The last digits of long ones depend on the processor and on the versions of libraries."""


def fingerprint(lines: Sequence[str]) -> str:
    """Return a hash of the numbers of a figure, with six significant digits and nine decimal places each.

    It is stored in the image file to detect outdated figures.
    """
    # Adding 0 makes -0.0 equal to 0.0.
    text = NUMBER.sub(lambda number: f"{round(float(number[0]), 9) + 0.0:.6g}", "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


FIGURES: Mapping[str, Picture] = {
    "docs/img/mechanism.svg": (mechanism.figure, mechanism.numbers),
    "docs/img/masking-pays.svg": (partial(masking_page.figure, masking_page.PAYS), _masking_numbers),
    "docs/img/masking-costs.svg": (partial(masking_page.figure, masking_page.COSTS), masking_page.row_table),
    "docs/img/continual.svg": (partial(continual.figure, continual.BY_TASK), _continual_numbers),
    "docs/img/continual-rates.svg": (partial(continual.figure, continual.BY_RATE), _continual_numbers),
    "docs/img/language-models.svg": (language_models.rate_figure, language_models.result_table),
    **{
        f"docs/img/evidence-{file}.svg": (partial(rate_figure, name), partial(image_pair_numbers, name))
        for file, name in {"rates": "fig-rates", "sgdm": "fig-rates-sgdm", "resnet": "fig-rates-resnet"}.items()
    },
    "docs/img/evidence-clicks.svg": (partial(rate_figure, CLICK_CURVES), lambda: pair_numbers(click_pairs())),
    "docs/img/evidence-forest.svg": (forest, finding_table),
    **PICTURES,
}
"""The image files of the documentation: the function that draws each, and the function that lists its numbers."""


def labels(image: str) -> list[str]:
    """Return the texts of an SVG image that contain letters, in alphabetical order.

    Numbers at the ticks of an axis are left out: the fingerprint covers the numbers of a figure.
    """
    return sorted(text for text in re.findall(r"<text\b[^>]*>([^<]*)", image) if re.search("[A-Za-z]", text))


def is_current(path: str) -> bool:
    """Whether a figure was drawn from the numbers that the archive contains now, and with the labels of now."""
    file = ROOT / path
    if not file.exists():
        return False
    image = file.read_text("utf-8")
    return fingerprint(FIGURES[path][1]()) in image and labels(image) == labels(_image(path))


def draw(path: str) -> None:
    """Draw a figure of the documentation and write its file."""
    (ROOT / path).write_text(_image(path), "utf-8")


def _image(path: str) -> str:
    """Return the SVG image of a figure, with its fingerprint."""
    import matplotlib
    from matplotlib import pyplot

    draw_figure, numbers = FIGURES[path]
    with matplotlib.rc_context(palette.STYLE):
        figure, source = draw_figure(), fingerprint(numbers())
        style = f"<style>{palette.color_css()}</style><!-- {source} -->"
        image = figures.svg(figure, "figure", "").replace("><", f">{style}<", 1) + "\n"
    pyplot.close(figure)
    return image
