"""SQL of the proof's findings and runs."""
