"""Order 1030 between a shop, Halfnote and a receiver, each in its own process: `make demo`."""
