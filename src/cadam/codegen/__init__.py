"""From a rule to the source of its kernels: a recorded program, then C or Triton."""
