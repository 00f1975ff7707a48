"""Engines whose steps are JAX: forward pass, KV pages and sampler. Imported only where option `device` asks for it."""
