"""Reads days, proves them, stores the findings."""
