"""The build of the package with the C kernels, and without them, which it reports."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cadam
from cadam.native import build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the build hook for a copy of the package that contains an older library. hatchling is not needed."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    package = Path(cadam.__file__).parent
    shutil.copytree(package, tmp_path / "src" / "cadam", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.delenv("CADAM_WITHOUT_KERNELS", raising=False)
    made = module.NativeKernels()
    made.root = str(tmp_path)
    library(made).write_text("older")
    return made


def built(hook: Any, version: str = "standard") -> dict[str, Any]:
    """Return the build data that the hook gives to hatchling."""
    told: dict[str, Any] = {"artifacts": []}
    hook.initialize(version, told)
    return told


def library(hook: Any) -> Path:
    return Path(hook.root) / "src" / "cadam" / "native" / "native.so"


def test_a_rule_that_cannot_be_generated_fails_the_build(hook: Any) -> None:
    adam = Path(hook.root) / "src" / "cadam" / "rules" / "adam.py"
    adam.write_text(adam.read_text().replace("f.sqrt(vhat)", "f.root(vhat)"))
    with pytest.raises(SystemExit, match=r"could not be generated from the rules(.|\n)*no attribute 'root'"):
        built(hook)


def test_a_compiler_that_fails_fails_the_build(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", shutil.which("false") or "/bin/false")
    with pytest.raises(
        SystemExit, match=r"no C kernels could be compiled; CADAM_WITHOUT_KERNELS=1 builds without.*false -std"
    ) as error:
        built(hook)
    assert error.value.code != 0


@pytest.mark.parametrize("missing", ["/nowhere/clang", "no-such-ccache gcc"])
def test_a_compiler_that_was_asked_for_and_is_not_there_fails_the_build(
    hook: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("CC", missing)
    with pytest.raises(SystemExit, match=rf"builds without.*\$CC is '{missing}', but no such program"):
        built(hook)
    assert library(hook).read_text() == "older"


@pytest.mark.parametrize(("asked", "found"), [("one", "one"), (" two -m32 ", "two -m32"), ("", "gcc"), (" ", "gcc")])
def test_the_compiler_is_the_one_asked_for_or_a_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, found: str
) -> None:
    for name in ("one", "two", "gcc", "clang"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", asked)
    assert build.compiler() == found


@pytest.mark.parametrize("wanted", ["", "0"])
def test_without_kernels_must_be_meant(hook: Any, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("CC", shutil.which("false") or "/bin/false")
    monkeypatch.setenv("CADAM_WITHOUT_KERNELS", wanted)
    with pytest.raises(SystemExit):
        built(hook)


def test_without_kernels_if_that_is_asked_for(
    hook: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", shutil.which("false") or "/bin/false")
    monkeypatch.setenv("CADAM_WITHOUT_KERNELS", "1")
    assert built(hook, "editable") == {"artifacts": []}
    assert not library(hook).exists()
    assert "built without the C kernels: CADAM_WITHOUT_KERNELS is set" in capsys.readouterr().err


def test_a_wheel_without_kernels_leaves_those_of_the_source_tree(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install uses the kernels of the source tree. The next test is about wheels."""
    monkeypatch.setenv("CADAM_WITHOUT_KERNELS", "1")
    assert built(hook) == {"artifacts": []}
    assert library(hook).read_text() == "older"


def test_a_wheel_packs_no_library_but_the_one_it_made() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    for suffix in ("", ".sha256"):
        assert f"/src/cadam/native/native.so{suffix}" in targets["wheel"]["exclude"]
    assert "artifacts" not in targets["wheel"]


def test_without_a_compiler_the_package_is_built_without_kernels_and_a_warning(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert built(hook, "editable") == {"artifacts": []}
    assert not library(hook).exists()
    assert "built without the C kernels: no C compiler was found" in capsys.readouterr().err


def test_a_compiler_that_works_makes_a_wheel_of_this_platform(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake compiler only creates the requested file."""
    fake = Path(hook.root) / "compiler"
    fake.write_text('#!/bin/sh\nfor last; do :; done\necho compiled > "$last"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    told = built(hook)
    assert library(hook).read_text() == "compiled\n"
    assert told["pure_python"] is False
    assert told["tag"].startswith("py3-none-")
    assert told["artifacts"] == [f"src/cadam/native/native.so{suffix}" for suffix in ("", ".sha256")]
    assert build.is_intact(library(hook))


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:100] + bytes([b[100] ^ 1]) + b[101:], lambda b: b""])
def test_a_library_with_another_byte_is_not_whole(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "some.so"
    path.write_bytes(bytes(range(200)))
    assert not build.is_intact(path)  # there is no checksum yet
    build.checksum_path(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    assert build.is_intact(path)
    path.write_bytes(damage(path.read_bytes()))
    assert not build.is_intact(path)


@pytest.mark.parametrize(
    "name", ["rules/adam.py", "rules/update.py", "codegen/c_source.py", "codegen/trace.py", "native/src/cadam.h"]
)
def test_an_edited_source_is_another_fingerprint(name: str, hook: Any) -> None:
    package = Path(hook.root) / "src" / "cadam"
    spec = importlib.util.spec_from_file_location("copied_build", package / "native" / "build.py")
    assert spec
    assert spec.loader
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    assert copied.fingerprint() == build.fingerprint()
    (package / name).write_text((package / name).read_text() + "\n")
    assert copied.fingerprint() != build.fingerprint()


def test_the_fingerprint_covers_every_module_that_generates_the_header() -> None:
    code = "import sys, cadam.codegen.c_source; print(*(m.__file__ for n, m in sys.modules.items() if 'cadam.' in n))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    package = Path(cadam.__file__).parent
    covered = {path for name in build.GENERATORS for path in package.glob(name)}
    assert set(map(Path, done.stdout.split())) - covered == {package / "codegen" / "__init__.py"}
    assert covered <= set(map(Path, done.stdout.split()))


@pytest.mark.parametrize("flags", ["FLAGS", "X86_64_FLAGS"])
def test_other_flags_are_another_fingerprint(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.fingerprint("header")
    assert build.fingerprint("header") == before
    monkeypatch.setattr(build, flags, type(getattr(build, flags))())
    assert build.fingerprint("header") != before
