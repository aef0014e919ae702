"""Check-back: finds undecided transactions, asks their producers, and records the answers."""
