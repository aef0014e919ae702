"""The SQL of whether the destination of a shard limits its rate."""

# A pause that ended so long ago was not renewed: nothing was sent meanwhile, or an older version sent, which does not
# know pauses. It says nothing any more, and a new holder of the shard begins without it.
LASTS_MIN = 10
# Of a row of checkpoint by its alias, at a time.
IS_LIMITED = f"{{0}}.limited_since is not null and {{0}}.paused_until > {{1}} - interval '{LASTS_MIN} minutes'"
