"""The engine's methods that its process is asked for by name."""

from __future__ import annotations

from typing import Literal

Method = Literal[
    "abort",
    "flush_cache",
    "hold_prefix",
    "release_prefix",
    "end_kv_transfer",
    "get_server_info",
    "check_ledger",
    "start_profile",
    "stop_profile",
    "load_lora_adapter",
    "unload_lora_adapter",
    "pause_generation",
    "continue_generation",
    "release_memory_occupation",
    "resume_memory_occupation",
    "get_weights_by_name",
    "update_weight_version",
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "check_weight_updates",
    "commit_update",
    "drop_update",
    "init_weights_update_group",
    "destroy_weights_update_group",
]
UPDATES = "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed"
WAITING = (
    *("unload_lora_adapter", "pause_generation", "continue_generation"),
    *("release_memory_occupation", "resume_memory_occupation", "commit_update", "drop_update"),
    *("init_weights_update_group", "destroy_weights_update_group"),
    *UPDATES,
)
"""Methods that wait for others, or take long."""
