"""Decoders with multi-head latent attention (DeepSeek-V2 and V3): one latent a token in the cache."""
