"""The image study: networks learn to tell images apart while the images turn or the labels lie."""

import os
import sys
from typing import Any


def _keep_compile_workers() -> None:
    """Unless told otherwise, let torch keep the processes that compile kernels.

    It sends them away after a minute without work, and has new ones made when there is more: a run that compiled a
    second network then was seen, once, to wait for one of these for good.
    """
    name = "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL"
    if name in os.environ:
        return
    os.environ[name] = "0"
    config: Any = sys.modules.get("torch._inductor.config")  # if it has looked already
    if hasattr(config, "quiesce_async_compile_pool"):
        config.quiesce_async_compile_pool = False


_keep_compile_workers()
