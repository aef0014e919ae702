"""Pull: consumers claim the messages of a subscription, and acknowledge them."""
