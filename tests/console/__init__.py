"""The console: its pages, its acts, its sessions, and what a browser sees."""
