"""Records what steps spend their time on, with torch's profiler, as a trace that Chrome and Perfetto show."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from sgl.errors import InvalidRequest


class StepProfiler:
    """Records between `start` and `stop`. Both are called on the thread that is to be recorded."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Begin. Raises InvalidRequest if it has begun."""
        if self._profile is not None:
            raise InvalidRequest("the profiler is running already: stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> str:
        """End, and write the trace to a new temporary folder; returns the file's path. Raises InvalidRequest if none
        was begun."""
        if self._profile is None:
            raise InvalidRequest("the profiler is not running: start it first")
        profile, self._profile = self._profile, None
        profile.stop()
        path = Path(tempfile.mkdtemp(prefix="sgl-profile-")) / "trace.json"
        profile.export_chrome_trace(str(path))
        return str(path)
