"""Executes recorded programs beside the scheduler: their streams, forks and leases."""
