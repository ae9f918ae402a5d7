"""Find, check and load the compiled library, and compile it again where it is out of date."""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ..codegen import c_source
from ..codegen.kernel_spec import KernelSpec
from ..rules import RULES, Rule
from . import build
from .structs import Words
from .torch_symbols import REQUIRED_SYMBOL, torch_symbols


class UnavailableError(Exception):
    """The compiled library, or something that it needs, cannot be used. The message says why."""


class _OutdatedError(UnavailableError):
    """A library file was compiled from other sources than the present ones, or it is damaged."""


@dataclass(frozen=True)
class Library:
    """A loaded library with the addresses of the torch functions that it calls."""

    c: ctypes.CDLL
    """The functions that run without Python's global lock."""
    locked: ctypes.PyDLL
    """The functions that call Python and therefore keep the lock."""
    torch: Words
    """The addresses of torch's functions in the order of `torch_symbols.SYMBOLS`."""

    @property
    def parallel_for(self) -> int:
        """The address of the function that spreads work over torch's threads."""
        return int(self.torch[0])


@cache
def package_library() -> Library:
    """Load the library with the package's own rules.

    The library that was built with the package is used. If a rule or a C source was edited since, or the file is
    damaged, the library is compiled again into the user's cache.

    Raises:
        UnavailableError: The library is missing or cannot be loaded, and it cannot be compiled.
    """
    if not build.LIBRARY.exists():
        raise UnavailableError(
            "the package has no compiled kernels, because there was no C compiler when it was installed, or "
            "CADAM_WITHOUT_KERNELS was set; `python -m cadam.native.build` compiles them"
        )
    fingerprint = build.fingerprint()
    try:
        c = _load(build.LIBRARY, fingerprint)
    except _OutdatedError as outdated:
        message = f"{outdated}: compiling the kernels again, once, which may take a minute"
        try:
            c = _compile("package", c_source.header(), fingerprint, message)
        except UnavailableError as error:
            raise UnavailableError(
                f"{outdated}, and {error}. `python -m {build.__name__}` compiles the kernels"
            ) from None
    return _declare(c)


@cache
def find_kernel(spec: KernelSpec) -> tuple[Library, int] | UnavailableError:
    """Find the compiled kernel of a rule.

    A rule that does not belong to the package is compiled once, into a separate library.

    Args:
        spec: The rule, its options and its state buffers.

    Returns:
        The library and the kernel's index in it, or the error that says why there is no such kernel. The error is
        returned rather than raised so that the answer is cached.
    """
    try:
        _required_torch_functions()
        is_of_package = RULES.get(spec.rule.name) is spec.rule
        library = package_library() if is_of_package else _library_of_rule(spec.rule)
    except UnavailableError as error:
        return error
    index = int(library.c.cadam_kernel_index(spec.without_storages.name.encode()))
    if index < 0:
        return UnavailableError(
            f"has no kernel for {spec.name}: the rule's variants must list the options that need it"
        )
    return library, index


@cache
def _library_of_rule(rule: Rule) -> Library:
    header = c_source.header([rule])
    return _declare(_compile(rule.name, header, build.fingerprint(header)))


def _compile(name: str, header: str, fingerprint: str, message: str = "") -> ctypes.CDLL:
    """Load a library for the rules of this header from the user's cache, compiling it on first use."""

    def make(path: Path) -> None:
        if message:
            warnings.warn(f"cadam: {message}", RuntimeWarning, 2)
        build.build(header, path, stamp=fingerprint)

    try:
        path = build.cached(f"{name}-{fingerprint}.so", make)
    except (build.BuildError, OSError) as error:
        raise UnavailableError(f"the kernels of {name!r} could not be compiled: {error}") from error
    return _load(path, fingerprint)


def _load(path: Path, fingerprint: str) -> ctypes.CDLL:
    """Load a library file, whose checksum and fingerprint must be the expected ones."""
    if not build.is_intact(path):
        raise _OutdatedError(f"{path} is damaged, or its checksum is missing")
    try:
        c = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"the compiled kernels cannot be loaded: {error}") from error
    if not hasattr(c, "cadam_fingerprint"):
        raise _OutdatedError(f"{path} has no fingerprint, so it is not a library of these kernels")
    c.cadam_fingerprint.restype = ctypes.c_char_p
    if c.cadam_fingerprint().decode() != fingerprint:
        raise _OutdatedError(f"{path} was compiled from other rules, C sources or flags than the present ones")
    return c


def _declare(c: ctypes.CDLL) -> Library:
    """Declare the argument types of a library's functions."""
    torch_functions = _required_torch_functions()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    c.cadam_read_steps.argtypes = [pointer, number, pointer]
    c.cadam_dense_step.argtypes = [pointer, number, pointer, number, number, pointer]
    c.cadam_snapshot_tensors.argtypes = [pointer, pointer, number, number, number, pointer, pointer, pointer]
    c.cadam_snapshot_tensors.restype = number
    c.cadam_memory_traffic.argtypes = [pointer, pointer, pointer, pointer, number, pointer]
    c.cadam_check_ids.argtypes = [pointer, number, number, pointer]
    c.cadam_check_ids.restype = number
    on_batches = (c.cadam_inputs_forward, c.cadam_inputs_add_numbers, c.cadam_inputs_backward)
    c.cadam_normal_numbers.argtypes, c.cadam_normal_numbers.restype = [number, pointer], None
    for function in (c.cadam_learn_per_event, c.cadam_score_events, *on_batches):
        function.argtypes, function.restype = [pointer, pointer], number
    for function in (c.cadam_split_lines, c.cadam_read_values):
        function.argtypes, function.restype = [pointer], None
    c.cadam_sparse_step.argtypes = [pointer, number, pointer, number, pointer, pointer, number, pointer]
    c.cadam_sparse_squared_norm.argtypes = [pointer, pointer, number, pointer, pointer, number, pointer]
    c.cadam_sparse_step.restype = c.cadam_sparse_squared_norm.restype = number
    c.cadam_index_find.argtypes = [pointer, pointer, number, pointer, number, pointer]
    c.cadam_index_assign.argtypes = [pointer, pointer, number]
    c.cadam_index_evict.argtypes = [pointer, number, number]
    c.cadam_index_expire.argtypes = [pointer, number]
    c.cadam_index_train.argtypes = [pointer, pointer, pointer, number, number]
    c.cadam_features_find.argtypes = [pointer, number, pointer]
    c.cadam_features_train.argtypes = [pointer, number, pointer, number]
    c.cadam_feature_assign.argtypes = [pointer, pointer, number]
    c.cadam_index_build.argtypes = [pointer]
    c.cadam_index_rehash.argtypes = [pointer, number, pointer, number]
    c.cadam_hash_texts.argtypes = [pointer, pointer, number, pointer]
    c.cadam_initial_rows.argtypes = [pointer, number, number, number, ctypes.c_double, pointer, pointer]
    for function in (
        c.cadam_index_assign,
        c.cadam_index_rehash,
        c.cadam_hash_texts,
        c.cadam_initial_rows,
        c.cadam_features_find,
        c.cadam_feature_assign,
    ):
        function.restype = None
    for function in (
        *(c.cadam_index_find, c.cadam_index_evict, c.cadam_index_expire, c.cadam_index_train, c.cadam_index_build),
        c.cadam_features_train,
    ):
        function.restype = number
    run_inline = ctypes.cast(c.cadam_run_inline, ctypes.c_void_p).value or 0
    os.register_at_fork(after_in_child=lambda: _run_inline_from_now_on(run_inline))
    locked = ctypes.PyDLL(c._name)
    locked.cadam_are_containers_unchanged.argtypes = [pointer, pointer, number]
    locked.cadam_replay_step.argtypes, locked.cadam_replay_step.restype = [pointer, pointer], number
    c.cadam_replay_launch.argtypes, c.cadam_replay_launch.restype = [pointer, pointer, number, pointer], number
    return Library(c, locked, torch_functions)


def _run_inline_from_now_on(run_inline: int) -> None:
    """Replace torch_parallel_for in a forked child, which has none of its parent's threads and would wait forever."""
    torch_symbols().addresses[0] = run_inline


def _required_torch_functions() -> Words:
    """Return the addresses of torch's functions; 0 for a missing one. Only `REQUIRED_SYMBOL` must exist."""
    symbols = torch_symbols()
    if REQUIRED_SYMBOL in symbols.missing:
        raise UnavailableError(
            f"torch {torch.__version__} lacks the symbol {REQUIRED_SYMBOL}, which the C kernels require. "
            "torch 2.10 and later have it"
        )
    return symbols.addresses
