"""Layers: one file a method, one interface."""

from snarenet.layers.snare import SnareLayer

__all__ = ["SnareLayer"]
