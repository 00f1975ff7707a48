"""Constraints of requests: compiled in processes of their own, then followed token by token."""
