"""SQL of the time of the next check: no check is sent while the producer group asked for none."""

# The end of the pause that a group asked for, also if it is over; null: there was none. Producers that claim checks are
# not held, and `infinity` is that of a group without a URL. Primary key.
HELD_UNTIL = """
select nullif(g.held_until, 'infinity') from producer_group g where g.name = {name} and g.checks = 'call'
"""

# Of an op `o`, a check_back row `c` and a half `h`, each of which may be missing: null if the transaction is decided or
# parked. `greatest` leaves out null.
NEXT_CHECK_AT = f"""
case when o.verdict is null and c.state is distinct from 2
  then greatest(coalesce(c.next_check_at, h.first_check_at), ({HELD_UNTIL.format(name="h.producer_group")})) end
"""
