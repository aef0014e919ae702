"""Halfnote: a transaction coordinator over HTTP."""
