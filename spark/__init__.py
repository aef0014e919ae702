"""The nightly proof: reads the service's rows and reports where they disagree. Imports nothing of the service."""
