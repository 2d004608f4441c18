"""Doors to other tools, each imported by whoever wants it; every tool is an extra.

Models that were written for CVXPY, CasADi or AMPL become sets (`Constraints.from_cvxpy`, `from_casadi`, `from_nl`);
layers go into Lightning, Gymnasium, BoTorch and scikit-learn, a file each.
"""
