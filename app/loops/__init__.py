"""Small loops that follow settings, measure, and announce."""
