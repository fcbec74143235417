"""Engines by name. In: a spec: the URL of a vLLM or SGLang server, `name[:argument]`, or
`import.path:Class[:argument]`. Out: an Engine for a model folder.

A class that is to be named here has `from_spec(argument, model)`. Refuses (EngineError) a name that
leads nowhere.
"""

from importlib import import_module
from pathlib import Path

from nanoswe_proxy.engine.base import Engine
from nanoswe_proxy.errors import EngineError

ENGINES = {
    "remote": "nanoswe_proxy.engine.remote:RemoteEngine",
    "scripted": "nanoswe_proxy.engine.scripted:ScriptedEngine",
}


def load_engine(spec: str, model: Path) -> Engine:
    """The engine that `spec` names."""
    name, _, argument = (f"remote:{spec}" if "://" in spec[:8] else spec).partition(":")
    target = ENGINES.get(name)
    if target is None:
        class_name, _, argument = argument.partition(":")
        target = f"{name}:{class_name}"
    module, _, class_name = target.partition(":")
    try:
        found = getattr(import_module(module), class_name)
        engine: Engine = found.from_spec(argument, model)
    except (ImportError, AttributeError, ValueError, OSError, TypeError) as error:
        raise EngineError(f"engine {spec!r}: {error}; known: {', '.join(ENGINES)}") from error
    return engine
