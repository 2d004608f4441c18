/* Sets in the plane: rows l ≤ g(x, y) ≤ u, written one a line.
 *
 *   1 <= x^2 + y^2 <= 4        both bounds
 *   x + y = 1                  an equality
 *   y <= sin(x)                both sides have variables: g = y − sin(x), u = 0
 *
 * A row of degree one is a `Linear` set of the library, squares without a product x·y a `Quadratic` with a diagonal H,
 * any other a `Nonlinear`. The catalogue is written in the same language as a user's own formulas.
 */
"use strict";
(() => {
  const { FormulaError, parse, isConstant, constantOf, jet, polynomial, python } = Explorer.formula;

  const RELATION = /(<=|>=|≤|≥|<|>|==|=)/;
  const BELOW = ["<=", "≤", "<"];
  const ABOVE = [">=", "≥", ">"];

  /** [lower, tree, upper] of a line. */
  function readRow(line) {
    const pieces = line.split(RELATION).map((piece) => piece.trim());
    if (pieces.length === 1) throw new FormulaError("a row needs a bound: write <=, >= or =");
    if (pieces.length > 5) throw new FormulaError("a row has two bounds at most");
    const trees = pieces.filter((_, i) => i % 2 === 0).map(parse);
    const signs = pieces.filter((_, i) => i % 2 === 1);
    if (trees.length === 3) return between(trees, signs);
    const [left, right] = trees;
    const [tree, bound, turned] = isConstant(right)
      ? [left, constantOf(right), false]
      : isConstant(left)
        ? [right, constantOf(left), true]
        : [{ op: "-", args: [left, right] }, 0, false];
    if (isConstant(tree)) throw new FormulaError("neither x nor y is in this row");
    if (signs[0].startsWith("=")) return [bound, tree, bound];
    return BELOW.includes(signs[0]) !== turned ? [-Infinity, tree, bound] : [bound, tree, Infinity];
  }

  function between([first, tree, last], signs) {
    const rising = signs.every((sign) => BELOW.includes(sign));
    if (!rising && !signs.every((sign) => ABOVE.includes(sign))) {
      throw new FormulaError("both relations of a row must point the same way, as in 1 <= x <= 2");
    }
    if (!isConstant(first) || !isConstant(last)) throw new FormulaError("the outer bounds must be numbers");
    if (isConstant(tree)) throw new FormulaError("neither x nor y is in this row");
    const bounds = [constantOf(first), constantOf(last)];
    const [lower, upper] = rising ? bounds : bounds.reverse();
    return [lower, tree, upper];
  }

  /** A row {text, lower, upper, equality, at, kind, polynomial, python}; `at(x, y)` is its jet. */
  function row(line) {
    const [lower, tree, upper] = readRow(line);
    if (Number.isNaN(lower) || Number.isNaN(upper)) throw new FormulaError("a bound is not a number");
    if (lower > upper) throw new FormulaError(`the lower bound ${lower} is above the upper bound ${upper}`);
    const coefficients = polynomial(tree);
    const bent = coefficients && (coefficients[3] || coefficients[4] || coefficients[5]);
    const kind = !coefficients ? "function" : !bent ? "linear" : coefficients[4] ? "quadratic" : "diagonal";
    const text = line.trim();
    return { text, lower, upper, equality: lower === upper, at: jet(tree), kind, coefficients, python: python(tree) };
  }

  /** The set of these lines; an error names its line. */
  function read(text) {
    const rows = [];
    text.split("\n").forEach((line, i) => {
      if (line.trim() === "") return;
      try {
        rows.push(row(line));
      } catch (error) {
        if (!(error instanceof FormulaError)) throw error;
        throw new FormulaError(`Line ${i + 1}: ${error.message}.`);
      }
    });
    if (!rows.length) throw new FormulaError("Write at least one row, for example x^2 + y^2 <= 1.");
    if (rows.length > 8) throw new FormulaError(`Eight rows at most, but there are ${rows.length}.`);
    const linear = rows.every(({ kind }) => kind === "linear");
    const curved = rows.some(({ kind }) => kind === "function" || kind === "quadratic");
    return { text, rows, linear, curved };
  }

  /** How far a value is above or below the bounds of its row, 0 between them; NaN stays NaN. */
  const outside = (value, { lower, upper }) => value - Math.min(Math.max(value, lower), upper);

  /** The largest violation of a point; infinite where a row is not a number. */
  function violation(set, [x, y]) {
    const worst = Math.max(...set.rows.map((row) => Math.abs(outside(row.at(x, y)[0], row))));
    return Number.isNaN(worst) ? Infinity : worst;
  }

  const CATALOGUE = [
    ["disk", "Disk", "x^2 + y^2 <= 1"],
    ["lens", "Two disks: their intersection", "(x - 0.7)^2 + y^2 <= 1.44\n(x + 0.7)^2 + y^2 <= 1.44"],
    ["ring", "Ring", "1 <= x^2 + y^2 <= 4"],
    ["slab", "Ring and slab: two pieces", "1 <= sqrt(x^2 + y^2) <= 2\n-0.5 <= x <= 0.5"],
    ["torus", "Slice of a torus: two pieces", "(sqrt(x^2 + 0.36) - 1.5)^2 + y^2 <= 0.49"],
    ["wedge", "Wedge: two half-planes", "x + 3y <= 1\n-x + 3y <= 1"],
    ["polytope", "Polytope", "y >= -1\nx <= 1.5\nx + y <= 2\n-x + 2y <= 2\n-2x - y <= 2.5"],
    ["segment", "Simplex: a segment", "x + y = 1\nx >= 0\ny >= 0"],
    ["triangle", "Simplex: a triangle", "x >= 0\ny >= 0\nx + y <= 1"],
    ["sine", "Sine curve: an equality", "y - sin(2x) = 0"],
    ["crescent", "Crescent: non-convex, one piece", "0.3x^2 + (y + 1 - 0.4x^2)^2 <= 1"],
  ].map(([id, name, text]) => ({ id, name, text }));

  Explorer.sets = { read, outside, violation, CATALOGUE };
})();
