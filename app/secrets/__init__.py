"""Secrets at rest and signatures."""
