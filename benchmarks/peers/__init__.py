"""Times optimizer steps and compares them with other optimizers: `python -m benchmarks.peers`."""
