"""One rank: its share of the model, its caches, sampling, speculation and the scheduler of its lanes."""

from .engine import Engine
from .loading import EngineSettings, load_engine

__all__ = ["Engine", "EngineSettings", "load_engine"]
