"""The paper's claims as commands: every figure and table of it, computed again."""
