"""Tests of the whole system: kills, faults, clocks, failover, demo."""
