"""SQL of API keys, the audit, sealed secrets, gauges, switches and the server's state."""
