"""SQL of the outbox log, leases, checkpoints, retries and receipts."""
