"""Actions of people over HTTP or the command line, each with an audit row."""
