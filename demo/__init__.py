"""Order 1030 between a shop, Halfnote and a receiver, each a process of its own: `make demo`."""
