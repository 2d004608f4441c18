"""Writes `pyomo.nl` and `pyomo.col`, the model that test_nl.py reads; needs Pyomo: python written_by_pyomo.py."""

from pathlib import Path


def main() -> None:
    """Problem 71 of Hock and Schittkowski with a fifth variable, a range and another curve."""
    import pyomo.environ as pyo

    model = pyo.ConcreteModel()
    model.I = pyo.RangeSet(4)
    model.x = x = pyo.Var(model.I, bounds=(1, 5), initialize={1: 1, 2: 5, 3: 5, 4: 1})
    model.z = z = pyo.Var(initialize=0.5)
    model.objective = pyo.Objective(expr=x[1] * x[4] * (x[1] + x[2] + x[3]) + x[3] + z**2)
    model.product = pyo.Constraint(expr=x[1] * x[2] * x[3] * x[4] >= 25)
    model.sphere = pyo.Constraint(expr=sum(x[i] ** 2 for i in model.I) == 40)
    model.range = pyo.Constraint(expr=pyo.inequality(-9, x[1] - 2 * x[2] + z, 3))
    model.sum = pyo.Constraint(expr=z + x[1] <= 4)
    model.curve = pyo.Constraint(expr=pyo.exp(z) + pyo.sin(x[1]) * pyo.tanh(x[2]) <= 3)
    model.write(str(Path(__file__).with_name("pyomo.nl")), io_options={"symbolic_solver_labels": True})
    Path(__file__).with_name("pyomo.row").unlink()


if __name__ == "__main__":
    main()
