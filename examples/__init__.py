"""Example programs that use Halfnote."""
