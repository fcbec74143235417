"""Renderers: messages to ids, by extension. In: a model folder. Out: a `Renderer` (`base`)."""
