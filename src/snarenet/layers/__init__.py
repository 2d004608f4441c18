"""Layers: one file a method, one interface."""

from snarenet.layers.base import Layer
from snarenet.layers.snare import SnareLayer

__all__ = ["Layer", "SnareLayer"]
