"""Start, drain and stop of one process, and the list of its loops."""
