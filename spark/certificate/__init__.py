"""The daily certificate: its digest tree, its document, its signature. Pure Python; nothing here reads a database."""
