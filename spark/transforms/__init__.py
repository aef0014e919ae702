"""Pure functions from frames to frames. rules.py lists every rule."""
