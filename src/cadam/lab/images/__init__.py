"""The image study: networks learn to tell images apart while the images turn or the labels lie."""

import os

# Torch sends the processes that compile kernels away after a minute without work, and has new ones made when there is
# more: a run that compiled a second network then was seen to wait for one of these for good. Keep the first ones.
os.environ.setdefault("TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL", "0")
