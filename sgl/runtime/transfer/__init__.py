"""Cached KV pages on their way from one engine to another: who offers which, and who reads them."""
