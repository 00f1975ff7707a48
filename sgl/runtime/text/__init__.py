"""Text to tokens, and tokens to text piece by piece, up to stop strings."""
