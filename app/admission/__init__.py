"""Checks that every request passes before its route runs: host, origin, size, API key, role and load limits."""
