"""The options of the programs. They need only Python, so that `--help` works where PySpark is not installed."""
