"""Where updates run. `base` says what an engine is, `choose` picks one for each parameter, `plan` keeps the choice."""
