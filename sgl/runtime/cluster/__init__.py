"""Replicas of a server on one or several hosts: Ray places and restarts them, the gateway shares requests out."""
