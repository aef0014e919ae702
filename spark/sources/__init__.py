"""Read frames from Postgres, Parquet and ledgers."""
