"""SQL of days, partitions and their removal."""
