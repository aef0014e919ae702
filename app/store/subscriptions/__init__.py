"""SQL of subscriptions, replays and dead letters."""
