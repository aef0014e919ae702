"""The nightly proof: reads what the service wrote, says where it does not agree. Imports nothing of the service."""
