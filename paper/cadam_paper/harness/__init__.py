"""The harness that computes, caches, archives and reports the experiments of the paper."""
