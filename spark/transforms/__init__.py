"""PURE: from frames to frames. rules.py names every rule."""
