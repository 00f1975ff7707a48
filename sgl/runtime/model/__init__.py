"""Checkpoints and the one decoder of all model families."""
