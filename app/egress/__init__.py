"""Outgoing connections: denied addresses, network policy, HTTP client."""
