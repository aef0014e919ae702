"""Days: creates partitions, keeps them as long as needed, checks the archive, removes them."""
