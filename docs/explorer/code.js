/* The state as a Python program that computes the same with the library. */
"use strict";
(() => {
  const number = (value) => {
    if (Math.abs(value) === Infinity) return value > 0 ? "torch.inf" : "-torch.inf";
    return Number.isInteger(value) && Math.abs(value) < 1e15 ? `${value}.0` : String(value);
  };
  const vector = (values) => `torch.tensor([${values.map(number).join(", ")}])`;
  const matrix = (rows) => `torch.tensor([${rows.map((row) => `[${row.map(number).join(", ")}]`).join(", ")}])`;

  const WIDTH = 88; // of a line

  /** A call on one line, or with a line for each argument. */
  function call(name, args, indent) {
    const line = `${name}(${args.join(", ")})`;
    const gap = " ".repeat(indent);
    if (line.length + indent <= WIDTH) return line;
    return `${name}(\n${args.map((arg) => `${gap}    ${arg},\n`).join("")}${gap})`;
  }

  /** lower=…, upper=… or equals=… of some rows; constants of their polynomials go to the other side. */
  function bounds(rows) {
    const offset = ({ kind, coefficients }) => (kind === "linear" || kind === "diagonal" ? coefficients[0] : 0);
    const list = (side) => {
      const values = rows.map((row) => row[side] - offset(row));
      return values.every((value) => value === values[0]) ? number(values[0]) : vector(values);
    };
    if (rows[0].equality) return [`equals=${list("upper")}`];
    const given = ["lower", "upper"].filter((side) => rows.some((row) => Number.isFinite(row[side])));
    return given.map((side) => `${side}=${list(side)}`);
  }

  const slopes = (rows) => matrix(rows.map(({ coefficients }) => coefficients.slice(1, 3)));

  const WRITERS = {
    linear: (rows) => ["sn.Linear", [slopes(rows), ...bounds(rows)]],
    diagonal: (rows) => {
      const H = matrix(rows.map(({ coefficients }) => [coefficients[3], coefficients[5]]));
      const straight = rows.some(({ coefficients }) => coefficients[1] || coefficients[2]);
      return ["sn.Quadratic", [H, ...(straight ? [slopes(rows)] : []), ...bounds(rows)]];
    },
    function: (rows, name) => ["sn.Nonlinear", [name, `rows=${rows.length}`, ...bounds(rows)]],
  };

  /** Rows of one kind, equalities apart, in the order of the first of each. */
  function groups(set) {
    const found = new Map();
    for (const row of set.rows) {
      const kind = row.kind === "quadratic" ? "function" : row.kind;
      const key = `${kind} ${row.equality}`;
      if (!found.has(key)) found.set(key, { kind, rows: [] });
      found.get(key).rows.push(row);
    }
    return [...found.values()];
  }

  function define(name, rows) {
    const formulas = rows.map(({ python }) => python);
    const result = formulas.length === 1 ? formulas[0] : `torch.cat([${formulas.join(", ")}], 1)`;
    return [`def ${name}(y, x):`, "    a, b = y[:, :1], y[:, 1:]", `    return ${result}`, ""];
  }

  function damping(state) {
    const { damping: kind, begin, ratio, constant } = state;
    if (kind === "constant") return `sn.Constant(${number(constant)})`;
    return `sn.Annealed(${number(begin)}, ${number(ratio)}${kind === "schedule" ? ", own_pace=False" : ""})`;
  }

  const LOSSES = {
    square: (t) => `0.5 * (solution.value - ${t}).square().sum()`,
    distance: (t) => `(solution.value - ${t}).norm()`,
    linear: (t) => `(solution.value * ${t}).sum()`,
  };

  /** The program. */
  function program(set, state) {
    const lines = ["import torch", "import snarenet as sn", "", "torch.set_default_dtype(torch.float64)", ""];
    const parts = groups(set).map(({ kind, rows }, i) => {
      const name = `g${i || ""}`;
      if (kind === "function") lines.push(...define(name, rows));
      return WRITERS[kind](rows, name);
    });
    const [first] = parts;
    const joined = parts.map((part) => call(...part, 4)).join("\n    & ");
    lines.push(parts.length === 1 ? `constraints = ${call(...first, 0)}` : `constraints = (\n    ${joined}\n)`);
    const start = state.start === "nearest" ? "sn.Nearest()" : "None";
    lines.push(
      `y = ${matrix([state.hat]).slice(0, -1)}, requires_grad=True)`,
      "solution = sn.repair(",
      `    constraints, y, start=${start}, damping=${damping(state)}, rows="${state.rows}",`,
      `    tol=${state.tol}, max_steps=${state.maxSteps},`,
      ")",
      `loss = ${LOSSES[state.loss](vector(state.target))}`,
      "loss.backward()",
      "print(solution.value, solution.steps, solution.describe(), y.grad)",
    );
    return lines.join("\n");
  }

  Explorer.program = program;
})();
