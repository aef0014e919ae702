"""Faults that are planted by SQL in a day that the real service made, and what must be found of each."""
