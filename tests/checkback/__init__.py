"""Tests of check-back."""
