"""What `halfnote apply` reads, compares and changes."""
