"""The Parquet archive: layout, writing, verification, cleanup."""
