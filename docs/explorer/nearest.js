/* The exact projection: the point of the set that is nearest to ŷ, and its derivative.
 *
 *   minimise ½|z − ŷ|²  over the set;   z − ŷ + μ ∇g(z) = 0,  g(z) = b    on one row,   or a corner of two rows
 *
 * Vertices of the rows' contours are where to look; the nearest are refined by Newton's method on these conditions.
 * On one row the derivative is the first block of [[I + μ∇²g, ∇g], [∇gᵀ, 0]]⁻¹; at a corner it is zero.
 */
"use strict";
(() => {
  const { Dual } = Explorer;
  const [HALF, CELLS] = [8, 160]; // where boundaries are looked for
  const TRIED = 12; // starts that are refined
  const APART = 0.3; // distance between two of them
  const FEASIBLE = 1e-9;
  const NEWTON = 30; // steps at most

  const cache = new WeakMap();

  /** Points on bounds of rows that (nearly) are in the set: [{row, bound, point}]. */
  function boundary(set) {
    if (!cache.has(set)) {
      const width = (2 * HALF) / CELLS;
      const near = ([x, y]) => set.rows.every((row) => {
        const [v, gx, gy] = row.at(x, y);
        return Math.abs(Explorer.sets.outside(v, row)) <= width * Math.hypot(gx, gy) + FEASIBLE;
      });
      const found = Explorer.contours(set, HALF, CELLS).flatMap(({ row, bound, rings }) =>
        rings.flat().filter(near).map((point) => ({ row, bound, point })));
      cache.set(set, found);
    }
    return cache.get(set);
  }

  /** The nearest vertices, no two of one bound close together. */
  function starts(set, [x, y]) {
    const sorted = boundary(set)
      .map((vertex) => ({ ...vertex, far: Math.hypot(vertex.point[0] - x, vertex.point[1] - y) }))
      .sort((p, q) => p.far - q.far);
    const chosen = [];
    for (const vertex of sorted) {
      const close = (other) => other.row === vertex.row && other.bound === vertex.bound
        && Math.hypot(other.point[0] - vertex.point[0], other.point[1] - vertex.point[1]) < APART;
      if (!chosen.some(close)) chosen.push(vertex);
      if (chosen.length === TRIED) break;
    }
    return chosen;
  }

  /** x of A x = b by Gaussian elimination with pivoting; the columns of b are solved for together. */
  function solve(A, b) {
    const M = A.map((row, i) => [...row, ...b[i]]);
    const n = A.length;
    for (let k = 0; k < n; k++) {
      const pivot = M.slice(k).reduce((best, row, i) => (Math.abs(row[k]) > Math.abs(M[best][k]) ? i + k : best), k);
      [M[k], M[pivot]] = [M[pivot], M[k]];
      for (let i = 0; i < n; i++) {
        if (i === k) continue;
        const share = M[i][k] / M[k][k];
        M[i] = M[i].map((entry, j) => entry - share * M[k][j]);
      }
    }
    return M.map((row, i) => row.slice(n).map((entry) => entry / row[i]));
  }

  /** The stationary point of the distance on g = b, from a vertex of it. */
  function onRow(row, bound, target, start) {
    let [x, y] = start;
    let mu = null;
    let matrix = null;
    for (let k = 0; k < NEWTON; k++) {
      const [v, gx, gy, xx, xy, yy] = row.at(x, y);
      if (mu === null) mu = ((target[0] - x) * gx + (target[1] - y) * gy) / (gx * gx + gy * gy);
      matrix = [[1 + mu * xx, mu * xy, gx], [mu * xy, 1 + mu * yy, gy], [gx, gy, 0]];
      const wrong = [[x - target[0] + mu * gx], [y - target[1] + mu * gy], [v - bound]];
      const [[dx], [dy], [dmu]] = solve(matrix, wrong);
      [x, y, mu] = [x - dx, y - dy, mu - dmu];
      if (Math.abs(dx) + Math.abs(dy) < 1e-15 * (1 + Math.abs(x) + Math.abs(y))) break;
    }
    const [first, second] = solve(matrix, [[1, 0], [0, 1], [0, 0]]);
    return [new Dual(x, ...first), new Dual(y, ...second)];
  }

  /** The corner where two rows reach their bounds, from a point near it. */
  function atCorner(rows, bounds, start) {
    let [x, y] = start;
    for (let k = 0; k < NEWTON; k++) {
      const jets = rows.map((row) => row.at(x, y));
      const [[dx], [dy]] = solve(jets.map(([, gx, gy]) => [gx, gy]), jets.map(([v], i) => [v - bounds[i]]));
      [x, y] = [x - dx, y - dy];
      if (Math.abs(dx) + Math.abs(dy) < 1e-15 * (1 + Math.abs(x) + Math.abs(y))) break;
    }
    return [new Dual(x), new Dual(y)];
  }

  /** What a vertex may lead to: a point of its row, and corners with the bounds of other rows nearby. */
  function refined(set, { row, bound, point }, target) {
    const found = [onRow(set.rows[row], bound, target, point)];
    set.rows.forEach((other, i) => {
      const [v, gx, gy] = other.at(...point);
      for (const level of new Set([other.lower, other.upper])) {
        if (i === row || !(Math.abs(v - level) <= 2 * APART * Math.hypot(gx, gy))) continue;
        found.push(atCorner([set.rows[row], other], [bound, level], point));
      }
    });
    return found;
  }

  /** The projection of ŷ as two dual numbers; null if no point of the set was found. */
  function nearest(set, target) {
    const outside = Explorer.sets.violation(set, target);
    if (outside === 0) return Dual.point(target);
    if (outside === Infinity) return null; // a row is not a number there: it may end before its bound
    const far = ([p, q]) => Math.hypot(p.v - target[0], q.v - target[1]);
    const found = starts(set, target)
      .flatMap((vertex) => refined(set, vertex, target))
      .filter((point) => Explorer.sets.violation(set, point.map(({ v }) => v)) <= FEASIBLE);
    return found.reduce((best, point) => (best === null || far(point) < far(best) ? point : best), null);
  }

  Explorer.nearest = nearest;
})();
