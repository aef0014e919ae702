"""Tests of the project itself: docs, locks, benchmarks."""
