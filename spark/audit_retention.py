"""How long rows of the audit are kept, as far as the proof knows it."""

# The default of the service's setting HALFNOTE_AUDIT_KEEP_S, in seconds; a test compares them.
AUDIT_KEEP_S = 400 * 86_400
