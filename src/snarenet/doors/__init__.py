"""Doors to other tools, one file each; import the one that you need, its extra is imported with it."""
