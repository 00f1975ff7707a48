"""Heads that guess a model's next tokens from its hidden states (EAGLE-3, arXiv 2503.01840)."""
