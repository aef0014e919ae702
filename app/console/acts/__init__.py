"""The acts of the console: each shows what it touches, asks for a reason, and calls the function of an API route."""
