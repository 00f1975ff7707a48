from sgl.runtime.platform.base import Platform
from sgl.runtime.platform.registry import GROUP, platform_of, registered
from sgl.runtime.runner.own import EngineRunner, OwnRunner, PlainRunner

__all__ = ["GROUP", "EngineRunner", "OwnRunner", "PlainRunner", "Platform", "platform_of", "registered"]
