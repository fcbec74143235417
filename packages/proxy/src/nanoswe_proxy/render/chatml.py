"""The old name."""

from nanoswe_proxy.render.base import Renderer as ChatMLRenderer

__all__ = ["ChatMLRenderer"]
