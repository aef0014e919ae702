"""Tests of operational messages."""
