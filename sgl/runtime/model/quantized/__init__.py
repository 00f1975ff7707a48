"""Checkpoints in four and eight bits."""
