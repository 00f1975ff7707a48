"""How long tests wait for what must come."""

PATIENCE = 600.0
"""Seconds. Only a test that fails waits for so long; a machine with ten times the load needs some of it."""
