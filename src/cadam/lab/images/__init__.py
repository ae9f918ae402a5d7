"""The image study: networks learn to tell images apart while the images turn or the labels lie."""

import os
import sys
from typing import Any

# Torch sends the processes that compile kernels away after a minute without work, and has new ones made when there is
# more: a run that compiled a second network then was seen, once, to wait for one of these for good. With the first ones
# kept, that should not happen.
KEEP = "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL"
if KEEP not in os.environ:
    os.environ[KEEP] = "0"
    config: Any = sys.modules.get("torch._inductor.config")  # if it has looked already
    if hasattr(config, "quiesce_async_compile_pool"):
        config.quiesce_async_compile_pool = False
