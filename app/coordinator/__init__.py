"""Half and end: wire structs, content digest, group commit."""
