"""Generate the rows of a plausible day from a seed, some thousand transactions at a time."""
