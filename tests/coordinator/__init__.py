"""Tests of half and end."""
