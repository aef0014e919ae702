"""Finds the suspect transactions of a day whose files lie on this machine: columns in place of Spark's plans."""
