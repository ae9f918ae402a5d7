"""The image experiments of the paper (figures 4 and 5, table 4).

Networks are trained on CIFAR-10 while the images are rotated (sudden or continuous shift) or some labels are replaced
by random ones (label noise).
"""

import os
import sys
from typing import Any


def _keep_compile_workers() -> None:
    """Keep the processes in which torch compiles kernels alive, unless the environment variable is set already.

    By default torch stops them after a minute without work and starts new ones when needed. A run that compiled a
    second network after such a pause was once observed to wait for a new process forever.
    """
    name = "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL"
    if name in os.environ:
        return
    os.environ[name] = "0"
    # A module that is already imported does not read the variable again, so its attribute is set directly.
    config: Any = sys.modules.get("torch._inductor.config")
    if hasattr(config, "quiesce_async_compile_pool"):
        config.quiesce_async_compile_pool = False


_keep_compile_workers()
