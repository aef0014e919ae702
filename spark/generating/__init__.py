"""Days that never were: the rows of a plausible day, made of a seed, some thousand transactions at a time."""
