from sgl.runtime.platform.base import Platform
from sgl.runtime.platform.registry import GROUP, platform_of, registered

__all__ = ["GROUP", "Platform", "platform_of", "registered"]
