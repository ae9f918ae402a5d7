"""The paper's claims as experiments: each is a name, cells to compute, and what they show beside what the paper says."""
