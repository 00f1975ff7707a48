"""Executes programs and requests: the engine, and everything below it down to the model."""
