"""Why each subscription has got a message or has not: one reason and one sentence for each."""
