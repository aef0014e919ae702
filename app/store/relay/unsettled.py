"""SQL for the log entries that a subscription has not settled."""


def unsettled_sql(entry: str) -> str:
    """Return a condition: subscription `s` has no receipt, retry or dead letter of a log entry, replays left out.

    `entry` is the alias of a row with transaction_id and position. Each table is probed by its primary key.
    """
    return " and ".join(
        f"not exists (select from {table} u where u.transaction_id = {entry}.transaction_id"
        f" and u.position = {entry}.position and u.subscription_id = s.subscription_id and u.replay = 0)"
        for table in ("receipt", "delivery_retry", "dead_letter")
    )
