"""SQL of half messages, Ops, reissues, topics and transactions."""
