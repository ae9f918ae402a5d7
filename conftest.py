"""Settings of all tests."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

# Parallel test workers share the processors, so more threads per worker would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# A process that a script starts in the background ignores SIGINT, and its children inherit that. Tests interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes; without cached bytecode, each of them would compile the package.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Processes that tests start must be able to import the package `tests`.
_ROOT = os.path.dirname(os.path.abspath(__file__))
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

# Commands in tests must not read the published results of the repository.
os.environ["CADAM_ARCHIVE"] = os.devnull + ".none"


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting all tests and modules, which takes most of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread while the tests of a module run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
