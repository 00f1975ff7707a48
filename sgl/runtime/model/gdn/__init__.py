"""Hybrids of gated delta nets and attention (Qwen3-Next, Qwen3.5)."""
