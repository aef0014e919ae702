"""Where messages go: one interface, one file for each kind of destination."""
