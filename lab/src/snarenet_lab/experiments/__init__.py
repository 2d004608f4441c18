"""Experiments: training runs side by side, and what they show."""
