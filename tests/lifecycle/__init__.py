"""Tests of start, drain and stop."""
