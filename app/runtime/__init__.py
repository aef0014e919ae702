"""What one process holds, its health, and the loop runner."""
