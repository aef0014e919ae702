"""Programs that show what Halfnote is for."""
