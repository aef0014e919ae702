"""Tests of secrets and signatures."""
