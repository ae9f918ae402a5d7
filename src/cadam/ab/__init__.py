"""The A/B comparison of optimizers on one stream: paired runs, their analysis, a recommendation and a report."""
