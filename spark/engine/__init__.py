"""The Spark session, files, signals and progress."""
