"""SQL of subscriptions whose consumers claim their messages."""
