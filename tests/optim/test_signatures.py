"""The constructors as tools see them: type hints, every option with its name and default, and docstrings."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import cadam
from cadam.optim import classes
from cadam.rules.family import FAMILY

CLASSES: dict[str, type[cadam.Optimizer]] = {name: getattr(cadam, name) for name in classes.__all__}
TORCH_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGDM": torch.optim.SGD,
    "RAdam": torch.optim.RAdam,
}


def parameters(cls: type[torch.optim.Optimizer]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls, eval_str=True).parameters)


def test_every_member_of_the_family_has_a_public_class_without_and_with_confidence() -> None:
    assert list(CLASSES) == [f"{prefix}{member.name}" for member in FAMILY for prefix in ("", "C")]
    assert set(CLASSES) <= set(cadam.__all__)
    for name, cls in CLASSES.items():
        assert cls.confidence == (name not in [member.name for member in FAMILY])


@pytest.mark.parametrize("name", CLASSES)
def test_every_option_is_a_parameter_of_the_constructor_with_its_default(name: str) -> None:
    found = parameters(CLASSES[name])
    assert {key: one.default for key, one in found.items() if key != "params"} == CLASSES[name].options_of()
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values())


@pytest.mark.parametrize("name", CLASSES)
def test_every_parameter_of_the_constructor_has_a_type(name: str) -> None:
    hints = typing.get_type_hints(CLASSES[name].__init__)
    assert set(hints) == {*parameters(CLASSES[name]), "return"}
    assert hints["fused"] == bool | None
    assert hints["state_dtype"] == torch.dtype | None


@pytest.mark.parametrize("name", [*TORCH_CLASSES, *(f"C{name}" for name in TORCH_CLASSES)])
def test_the_constructors_take_the_arguments_of_torch_in_the_same_order(name: str) -> None:
    ours, theirs = parameters(CLASSES[name]), parameters(TORCH_CLASSES[name.removeprefix("C")])
    assert set(theirs) <= set(ours)
    positional = [key for key, one in theirs.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    assert all(ours[key].kind == theirs[key].kind for key in theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_the_docstring_describes_every_argument_and_cites_a_paper(name: str) -> None:
    text = inspect.getdoc(CLASSES[name]) or ""
    for argument in parameters(CLASSES[name]):
        assert f"\n    {argument}: " in text
    assert "https://" in text
    assert ("https://arxiv.org/abs/2411.19647" in text) or not CLASSES[name].confidence
    assert "Option of the rule." not in text


def test_positional_arguments_and_keywords_give_the_same_options() -> None:
    by_position = cadam.CAdam([torch.ones(2)], 0.5, (0.8, 0.9), 1e-6, 0.1, True)
    by_name = cadam.CAdam([torch.ones(2)], lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, amsgrad=True)
    assert by_position.defaults == by_name.defaults
    with pytest.raises(TypeError, match="too many positional arguments"):
        cadam.CAdam([torch.ones(2)], 0.5, (0.8, 0.9), 1e-6, 0.1, True, True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="params"):
        cadam.CAdam()  # type: ignore[call-arg]


def test_a_subclass_with_a_rule_has_a_constructor_and_may_define_its_own() -> None:
    class Generated(cadam.Optimizer):
        rule = cadam.Lion.rule

    class Own(cadam.CAdam):
        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, rate)

    class Derived(Own):
        pass

    assert list(parameters(Generated))[:4] == ["params", "lr", "betas", "weight_decay"]
    generated: Any = Generated
    assert generated([torch.ones(2)], 0.5).defaults["lr"] == 0.5
    # Early versions of Python 3.11 show the signature of `__new__` for a class that inherits its constructor.
    assert list(inspect.signature(Derived.__init__).parameters) == ["self", "params", "rate"]
    assert Derived([torch.ones(2)], 0.5).defaults["lr"] == 0.5


def test_pydantic_checks_the_arguments() -> None:
    pydantic = pytest.importorskip("pydantic")
    construct = pydantic.validate_call(config={"arbitrary_types_allowed": True})(cadam.CAdam.__init__)
    optimizer = cadam.CAdam.__new__(cadam.CAdam)
    construct(optimizer, [torch.ones(2)], lr=0.5)
    assert optimizer.defaults["lr"] == 0.5
    with pytest.raises(pydantic.ValidationError):
        construct(optimizer, [torch.ones(2)], amsgrad="perhaps")


def test_jsonargparse_sees_every_option() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(cadam.CAdam, "optimizer", skip={"params"})
    options = parser.parse_args(["--optimizer.lr=0.5", "--optimizer.moments=int8"]).optimizer
    assert (options.lr, options.moments, options.betas) == (0.5, "int8", (0.9, 0.999))
    with pytest.raises(SystemExit):
        parser.parse_args(["--optimizer.momments=int8"])


@pytest.mark.skipif(find_spec("optax") is None, reason="needs JAX and optax")
def test_the_stub_files_are_up_to_date() -> None:
    """If this fails, run `python tools/write_stubs.py`, in an environment with Keras too."""
    tool = Path(__file__).parents[2] / "tools" / "write_stubs.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
