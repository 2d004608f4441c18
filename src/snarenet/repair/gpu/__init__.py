"""Engines and starts as GPU kernels, one file a kind, each with its CUDA C++ beside it; `graphs` records any of them.

`linear` and `admm` take constant linear rows, a few samples a block (`blocks`); `curved` and `search` take constant
rows with diagonal Hessians, one sample a block (`rows`). `launching` starts kernels, `nvrtc` compiles them.
"""
