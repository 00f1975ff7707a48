"""Records steps with torch's profiler, as a trace for Chrome and Perfetto."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from sgl.errors import InvalidRequest


class StepProfiler:
    """Records between `start` and `stop`, both called on the thread to record."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Raises InvalidRequest if it has begun."""
        if self._profile is not None:
            raise InvalidRequest("the profiler is running already: stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> str:
        """Write the trace to a new temporary folder and return its path. Raises InvalidRequest if nothing was
        begun."""
        if self._profile is None:
            raise InvalidRequest("the profiler is not running: start it first")
        profile, self._profile = self._profile, None
        profile.stop()
        path = Path(tempfile.mkdtemp(prefix="sgl-profile-")) / "trace.json"
        profile.export_chrome_trace(str(path))
        return str(path)
