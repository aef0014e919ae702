"""Request and answer models of the FastAPI routes."""
