"""Guesses what requests generate next, for the engine to verify several tokens in one step."""
