"""Tests of destinations."""
