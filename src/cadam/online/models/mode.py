"""Whether a model computes the same scores in training mode as in evaluation mode."""

from __future__ import annotations

import dis
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from inspect import isfunction
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DECLARATION = "same_in_training"
"""The attribute by which a module declares whether it, with the modules inside it, scores alike in both modes."""

_MODULE_NAMES = """
Identity Linear Bilinear Embedding EmbeddingBag Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish PReLU ReLU ReLU6 SELU SiLU
Sigmoid Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold LayerNorm GroupNorm RMSNorm
AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d Flatten Unflatten Upsample CosineSimilarity PairwiseDistance
Sequential ModuleList ModuleDict ParameterList ParameterDict RNN LSTM GRU RNNCell LSTMCell GRUCell
Dropout Dropout1d Dropout2d Dropout3d
"""
_TORCH_MODULES = tuple(getattr(nn, name) for name in _MODULE_NAMES.split() if hasattr(nn, name))
"""Modules of torch that do not depend on the mode, if the probability of their dropout is 0."""
_NAMESPACES: tuple[ModuleType, ...] = (torch, nn, nn.functional, torch.special, torch.linalg, math)
_FUNCTIONS = {id(f) for space in _NAMESPACES for f in vars(space).values() if callable(f) and not isinstance(f, type)}
_BUILTIN_NAMES = """
abs all any bool dict divmod enumerate float int isinstance len list map max min pow range reversed round set slice
sorted str sum super tuple zip ValueError TypeError RuntimeError AssertionError NotImplementedError
"""
_BUILTINS = frozenset(_BUILTIN_NAMES.split())
_ATTRIBUTES = frozenset(
    name
    for owner in (Tensor, torch, nn.functional, torch.special, torch.linalg, math, list, dict, set, tuple)
    for name in dir(owner)
    # A name that ends with an underscore changes a tensor, which may be a buffer, and a second pass changes it again.
    if not name.startswith("_") and not name.endswith("_")
)
_MODE_NAMES = """
training train eval requires_grad grad grad_fn is_leaf is_inference multinomial normal poisson
"""
_FORBIDDEN_NAMES = frozenset(_MODE_NAMES.split())
_MODE_PARTS = """
grad_enabled inference_mode dropout batch_norm instance_norm attention rand bernoulli rrelu gumbel fractional rng seed
"""
_FORBIDDEN_PARTS = tuple(_MODE_PARTS.split())
"""Parts of names of functions that read the mode, get it as an argument, or draw random numbers."""
_PLAIN_TYPES: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter)
_PLAIN_TYPES += (torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict)
_CLASS_METADATA: tuple[str, ...] = (
    "__module__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__orig_bases__",
)
_CLASS_METADATA += ("__annotate_func__", "__annotations_cache__", "__parameters__")
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MUTATOR_NAMES = """
append extend insert pop popitem remove discard clear update setdefault add sort reverse
"""
_MUTATORS = frozenset(_MUTATOR_NAMES.split())
"""Methods that change a list, a set or a dict."""
_UNUSED_METHODS = ("__init__", "__repr__", "extra_repr")
"""Methods that neither `forward` nor a change of the mode calls."""


def is_same_in_training(model: nn.Module) -> bool:
    """Return whether a model is known to compute the same scores in training mode as in evaluation mode.

    The attribute `same_in_training` of a module decides for this module and for all modules inside it. Other modules
    are the same if they are modules of torch that do not depend on the mode, or if all of these hold:

    - Their attributes are modules of the model, tensors, or plain values such as numbers, texts and lists of them.
    - `forward`, and the methods of the model that it uses, use nothing else than these attributes, functions of torch
      and `math`, methods of tensors and of containers, and common builtin functions.
    - This code does not read the mode, draw random numbers, or assign attributes, entries or global variables.

    Everything else counts as different, for example a function or an object of the user's, forward hooks and
    TorchScript: its code could read the mode.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return bool(getattr(model, DECLARATION, False))
    return _Analysis(model).is_same()


def declared_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that declare `same_in_training`: training mode may change their buffers."""
    if getattr(model, DECLARATION, False):
        return [model]
    return [module for child in model.children() for module in declared_modules(child)]


def has_only_known_code(model: nn.Module, loss: Callable[..., Tensor]) -> bool:
    """Return whether all Python code of a model and a loss is known to depend on nothing but their inputs.

    A CUDA graph repeats what the device did, without the Python code. The declaration `same_in_training` of a module of
    the user's own is not enough, because it says nothing about, for example, a counter in Python.
    """
    analysis = _Analysis(model)
    return (
        all(is_own(type(module)) for module in declared_modules(model))
        and analysis.is_same()
        and (is_own(loss) or analysis.is_known_loss(loss))
        and not analysis.may_change_containers
    )


def is_own(value: Any) -> bool:
    """Whether a class or a function belongs to this package."""
    return str(getattr(value, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


class _Analysis:
    """The modules of a model that do not declare whether they are the same, and the code of those of the user."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = set(model.modules())
        declarations = {module: getattr(module, DECLARATION, None) for module in _outside_declared(model)}
        self.undeclared = [module for module, declared in declarations.items() if declared is None]
        self.declares_difference = any(declared is not None and not declared for declared in declarations.values())
        self.owners = {
            owner
            for module in self.undeclared
            for owner in type(module).__mro__
            if not any(issubclass(kind, owner) for kind in _TORCH_MODULES)
        }
        self.attributes = {
            name
            for module in self.undeclared
            for names in (vars(module), module._parameters, module._buffers, module._modules)
            for name in names
        }
        self.seen: set[FunctionType] = set()
        self.has_containers = self.has_mutators = False

    @property
    def may_change_containers(self) -> bool:
        """Whether the code calls a method such as `append`, and there is a list, set or dict that it could belong to.

        A list that only exists during a call does not matter, but a method is known by its name alone.
        """
        return self.has_containers and self.has_mutators

    def is_known_loss(self, loss: Any) -> bool:
        """Return whether a loss is one of torch, or a function whose code is known."""
        if isinstance(loss, nn.Module):
            return type(loss).__module__ == "torch.nn.modules.loss"
        return self._is_known_value(loss) or (isfunction(loss) and self._is_known(loss))

    def is_same(self) -> bool:
        if self.declares_difference:
            return False
        return all(map(self._has_known_attributes, self.undeclared)) and all(map(self._has_known_code, self.owners))

    def _has_known_attributes(self, module: nn.Module) -> bool:
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p != 0:
            return False
        if isinstance(module, nn.RNNBase) and module.dropout != 0:
            return False
        values = {
            name: value
            for name, value in vars(module).items()
            if not (name == "_flat_weight_refs" and isinstance(module, nn.RNNBase))
        }
        own = [value for name, value in values.items() if name not in _MODULE_ATTRIBUTES]
        self.has_containers |= any(isinstance(value, (list, set, dict)) for value in own)
        return all(map(self._is_plain, values.values()))

    def _has_known_code(self, owner: type) -> bool:
        if owner.__module__.partition(".")[0] == "torch":
            return False
        return all(
            self._is_known_member(name, value)
            for name, value in vars(owner).items()
            if name not in (*_CLASS_METADATA, *_UNUSED_METHODS)
        )

    def _is_known_member(self, name: str, value: Any) -> bool:
        function = _function(value)
        if function is None:
            return self._is_plain(value)
        if name != "forward" and hasattr(nn.Module, name):
            return False  # for example `train`
        # Python calls methods such as `__getitem__` without their name. Others are analyzed where they are used.
        return self._is_known(function) if name == "forward" or name.startswith("__") else True

    def _is_plain(self, value: Any, depth: int = 0) -> bool:
        if type(value) in _CONTAINERS and depth < 8:
            entries = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            return all(self._is_plain(entry, depth + 1) for entry in entries)
        return type(value) in _PLAIN_TYPES or (isinstance(value, nn.Module) and value in self.modules)

    def _is_known(self, function: FunctionType) -> bool:
        """Whether the code of a function, and of the methods that it uses, is known not to depend on the mode."""
        if function in self.seen:
            return True
        self.seen.add(function)
        if not self._is_plain((function.__defaults__, function.__kwdefaults__)):
            return False
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # `super()` uses `__class__`. A variable that is not set yet is unknown.
            if name != "__class__" and (cell == CellType() or not self._is_known_value(cell.cell_contents)):
                return False
        return all(
            self._is_known_instruction(instruction, function)
            for code in _codes(function.__code__)
            for instruction in dis.get_instructions(code)
        )

    def _is_known_instruction(self, instruction: dis.Instruction, function: FunctionType) -> bool:
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL":
            if name in function.__globals__:
                return self._is_known_value(function.__globals__[name])
            return name in _BUILTINS
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            return self._is_known_attribute(name)
        # Other instructions with a name are assignments and imports.
        changes = instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "LOAD_BUILD_CLASS")
        return not changes and instruction.opcode not in dis.hasname

    def _is_known_attribute(self, name: str) -> bool:
        if _is_forbidden(name):
            return False
        self.has_mutators |= name in _MUTATORS
        functions = [_function(vars(owner)[name]) for owner in self.owners if name in vars(owner)]
        if not all(self._is_known(function) for function in functions if function is not None):
            return False
        return bool(functions) or name in self.attributes or name in _ATTRIBUTES or name in ("nn", "functional")

    def _is_known_value(self, value: Any) -> bool:
        self.has_containers |= isinstance(value, (list, set, dict))
        if isinstance(value, ModuleType):
            return value in _NAMESPACES
        if id(value) in _FUNCTIONS:
            return not _is_forbidden(value.__name__)
        return value is Tensor or self._is_plain(value)


def _outside_declared(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and the modules inside it, except those inside a module with a declaration."""
    yield module
    if getattr(module, DECLARATION, None) is None:
        for child in module.children():
            yield from _outside_declared(child)


def _is_forbidden(name: str) -> bool:
    return name in _FORBIDDEN_NAMES or any(part in name.lower() for part in _FORBIDDEN_PARTS)


def _function(value: Any) -> FunctionType | None:
    """Return the function of an attribute of a class: a method, a static method, a class method or a property."""
    function = value.fget if type(value) is property else getattr(value, "__func__", value)
    return function if isfunction(function) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
