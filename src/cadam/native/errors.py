"""What the engines raise. No torch: JAX uses the C kernels too."""


class UnavailableError(Exception):
    """Something cannot be used here; the message says why."""
