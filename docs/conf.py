"""The site, built by `make docs` from the Markdown beside this file: sphinx-build docs build/site."""

import inspect
import json
from pathlib import Path
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

project, author = "cadam", "the cadam authors"
html_title, html_theme = "cadam", "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["reports"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
suppress_warnings = ["myst.header"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
add_module_names = False
default_role = "code"
highlight_language = "text"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


class NotebookParser(MystParser):
    """A notebook as a page: its text, its code, and what the code printed or drew when it was last executed."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse("\n\n".join(_cells(json.loads(inputstring))), document)


def _cells(notebook: Any) -> list[str]:
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                parts.append(f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            elif text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    return parts


def _open_instead_of_save(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Links to reports, results and examples open them."""
    context["body"] = context.get("body", "").replace(' download=""', "")


def _from_the_root(app: Any, path: Path, parent: str, content: list[str]) -> None:
    """README and CONTRIBUTING are pages here: links between files of the root lead to them."""
    content[0] = (
        content[0].replace("](CONTRIBUTING.md", "](docs/contributing.md").replace("](CITATION", "](../CITATION")
    )


def _constructor(app: Any, what: str, name: str, thing: Any, options: Any, signature: Any, returns: Any) -> Any:
    """A class has the signature of its constructor, also where it is made by a `__new__` that takes anything."""
    if what != "class" or "__init__" not in vars(thing):
        return None
    _, *others = inspect.signature(thing.__init__).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in others]
    return str(inspect.Signature(plain)), ""


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _constructor)
    app.connect("include-read", _from_the_root)
    app.add_source_parser(NotebookParser)
    app.connect("html-page-context", _open_instead_of_save)
