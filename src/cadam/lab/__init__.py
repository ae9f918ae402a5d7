"""The paper's claims as experiments: a name, cells to compute, and what they show beside what the paper says."""
