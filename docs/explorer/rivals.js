/* What other methods answer, as the library's layers do: layers/hardnet.py and layers/dc3.py, on dual numbers.
 *
 *   HardNet   y − A⁺ r                                   linear, linearly independent rows; one step
 *   DC3       linear equalities by completion, then      y ← y − P v,  v ← γ p + β v,  p = 2 Pᵀ Jᵀ r,  γ = |p| / |M p|
 *
 * Each returns {value, jacobian, steps, violation}, or {why} where the method does not apply.
 */
"use strict";
(() => {
  const { Dual, ZERO, evaluate, residuals } = Explorer;

  const DEPENDENT = 1e-10; // hardnet.py: distance of a row from the others, in its own length
  const DC3 = { momentum: 0.5, trainSteps: 10, testSteps: 10, tol: 1e-4, rounding: 1e-9 }; // dc3.py

  const answer = (set, point, steps) => {
    const value = point.map(({ v }) => v);
    return { value, jacobian: Explorer.jacobianOf(point), steps, violation: Explorer.sets.violation(set, value) };
  };

  const sum = (duals) => duals.reduce((total, dual) => total.plus(dual), ZERO);
  const cross = ([a, b], [c, d]) => a * d - b * c;

  function hardnet(set, prediction) {
    const curved = set.rows.findIndex(({ kind }) => kind !== "linear");
    if (curved >= 0) return { why: `does not apply: its closed form is for linear rows, and row ${curved + 1} is curved` };
    if (set.rows.length > 2) {
      const count = set.rows.length;
      return { why: `does not apply: it needs linearly independent rows, and ${count} rows in the plane are dependent` };
    }
    const A = set.rows.map(({ at }) => at(0, 0).slice(1, 3));
    const lengths = A.map(([a, b]) => a * a + b * b);
    if (A.length === 2 && Math.abs(cross(...A)) <= DEPENDENT * Math.sqrt(lengths[0] * lengths[1])) {
      return { why: "does not apply: it needs linearly independent rows, and these two are parallel" };
    }
    const point = Dual.point(prediction);
    const r = residuals(set, evaluate(set, point));
    // the transposed pseudo-inverse: of one row a / |a|², of two their inverse
    const [[a, b], [c, d]] = A.length === 2 ? A : [A[0], [0, 0]];
    const inverse = A.length === 1
      ? [[a / lengths[0], b / lengths[0]]]
      : [[d, -c], [-b, a]].map((row) => row.map((entry) => entry / cross(...A)));
    const moved = point.map((entry, axis) => entry.minus(sum(r.map((dual, i) => dual.scaled(inverse[i][axis])))));
    return answer(set, moved, r.some(({ v }) => v !== 0) ? 1 : 0);
  }

  /** Where DC3 begins, and P = ∂y/∂y_p as a list of columns; {why} where equalities are dependent. */
  function complete(set, prediction) {
    const point = Dual.point(prediction);
    const equalities = set.rows.filter(({ kind, equality }) => kind === "linear" && equality);
    if (!equalities.length) return { start: point, P: [[1, 0], [0, 1]] };
    const rows = equalities.map(({ at, upper }) => {
      const [offset, a, b] = at(0, 0);
      return [a, b, upper - offset];
    });
    if (rows.length > 2 || (rows.length === 2 && Math.abs(cross(...rows)) <= DEPENDENT)) {
      return { why: "does not apply: completion needs independent equalities" };
    }
    if (rows.length === 2) {
      const [[a, b, p], [c, d, q]] = rows;
      const solution = [p * d - b * q, a * q - p * c].map((entry) => new Dual(entry / cross(...rows)));
      return { start: solution, P: [] };
    }
    const [[a, b, right]] = rows;
    const follows = Math.abs(b) > Math.abs(a) ? 1 : 0; // the longer column: what the equality determines
    const [own, free] = follows ? [b, a] : [a, b];
    const partial = point[1 - follows];
    const other = partial.scaled(-free / own).shifted(right / own);
    return follows
      ? { start: [partial, other], P: [[1, -free / own]], partial: "x" }
      : { start: [other, partial], P: [[-free / own, 1]], partial: "y" };
  }

  /** Σ of squares, as a root. */
  const length = (duals) => sum(duals.map((dual) => dual.times(dual))).root();

  /** γ = |p| / |M p|, with M = 2 Pᵀ Jᵀ J P over the violated rows. */
  function stepLength(rows, r, p, lift, reduce) {
    const direction = lift(p);
    const worst = Math.max(...r.map(({ v }) => Math.abs(v)));
    const J_p = rows.map(({ J }, i) =>
      Math.abs(r[i].v) > DC3.rounding * worst ? sum(J.map((entry, axis) => entry.times(direction[axis]))) : ZERO);
    const curvature = length(reduce(rows, J_p));
    return curvature.v > 0 ? length(p).over(curvature) : ZERO;
  }

  function dc3(set, prediction) {
    const { start, P, partial, why } = complete(set, prediction);
    if (why) return { why };
    const completed = ({ kind, equality }) => kind === "linear" && equality;
    const rest = { ...set, rows: set.rows.filter((row) => !completed(row)) };
    const lift = (entries) => [0, 1].map((axis) => sum(entries.map((entry, k) => entry.scaled(P[k][axis]))));
    const reduce = (rows, weights) => P.map((column) =>
      sum(rows.map(({ J }, i) => J[0].scaled(column[0]).plus(J[1].scaled(column[1])).times(weights[i]).scaled(2))));

    function correct(y, limit) {
      let velocity = P.map(() => ZERO);
      for (let taken = 0; taken < limit; taken++) {
        const rows = evaluate(rest, y);
        const r = residuals(rest, rows);
        if (!r.some(({ v }) => Math.abs(v) > DC3.tol)) return [y, taken];
        const p = reduce(rows, r);
        const gamma = stepLength(rows, r, p, lift, reduce);
        velocity = p.map((entry, k) => gamma.times(entry).plus(velocity[k].scaled(DC3.momentum)));
        y = y.map((entry, axis) => entry.minus(lift(velocity)[axis]));
      }
      return [y, limit];
    }

    const [trained, steps] = correct(start, DC3.trainSteps);
    const [final, more] = correct(trained.map((entry) => entry.detached()), DC3.testSteps);
    // steps of the second half have no gradient
    const value = trained.map((entry, axis) => new Dual(final[axis].v, entry.a, entry.b));
    return { ...answer(set, value, steps + more), partial };
  }

  Explorer.rivals = { hardnet, dc3, tolerance: DC3.tol };
})();
