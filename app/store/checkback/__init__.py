"""SQL of producer groups, check-back and pings."""
