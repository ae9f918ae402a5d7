"""Model files of the user's own."""

from __future__ import annotations

from pathlib import Path

from cadam.cli.ab import _digest_model
from cadam.online.models.model_file import imported_files


def test_the_files_that_a_model_file_imports_are_found(tmp_path: Path) -> None:
    files = {
        "model.py": "import torch, layers\nfrom parts.towers import Tower\n\ndef build():\n    import late.layer\n",
        "layers.py": "import model\nfrom missing import nothing\n",
        "parts/__init__.py": "from . import names\n",
        "parts/towers.py": "from ..layers import Layer\nfrom .deep import Deep\n",
        "parts/deep.py": "x = (",  # cannot be parsed
        "parts/names.py": "",
        "parts/other.py": "",
        "late/layer.py": "from parts import other as another\n",  # a package without __init__.py
        "torch.txt": "",
        "unused.py": "",
    }
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    found = [path.relative_to(tmp_path.resolve()).as_posix() for path in imported_files(tmp_path / "model.py")]
    expected = [name for name in files if name not in ("model.py", "torch.txt", "unused.py")]
    assert found == sorted(expected)


def test_a_changed_import_changes_the_hash_of_a_model_in_an_ab(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import layers\n")
    digests = []
    for name, code in (("other.py", "x = 1"), ("layers.py", "x = 1"), ("layers.py", "x = 2"), ("other.py", "x = 3")):
        (tmp_path / name).write_text(code)
        digests.append(_digest_model(tmp_path / "model.py"))
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[2]
