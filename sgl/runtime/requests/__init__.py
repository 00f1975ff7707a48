"""Calls become checked requests, and outputs become results."""
