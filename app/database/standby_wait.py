"""Reads whose answer waits until a synchronous standby has what was read."""

# The row of another database transaction is visible although no standby has it, if its wait was canceled or the server
# restarted. A database transaction that only reads does not wait either. This part of its statement writes a message of
# no table, so that the commit waits for all before it; without a synchronous standby it writes nothing. The statement
# must join `confirmed`: what nothing reads is not executed.
CONFIRMED = """confirmed as materialized (
  select case when current_setting('synchronous_standby_names') <> ''
    then pg_logical_emit_message(true, 'halfnote', '') end
)"""
