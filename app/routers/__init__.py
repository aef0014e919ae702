"""The HTTP routes: one file per resource."""
