"""Two optimizers on the same stream: the paired online A/B that stands in for the paper's production runs."""
