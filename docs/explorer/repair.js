/* The repair, as `snarenet.repair(set, y, start=None, damping=…, rows=…, tol=…, max_steps=…)` does it.
 *
 *   y ← y − d,   d = Jᵀ w,   (J Jᵀ + λ D) w = r,   r = relu(g − u) − relu(l − g)
 *
 * All of it runs on dual numbers, so the result carries its exact derivative in ŷ. tests/explorer compares steps,
 * points and derivatives with the library, whose files are named beside their numbers.
 */
"use strict";
(() => {
  const { Dual, ZERO } = Explorer;
  const { outside } = Explorer.sets;

  const EPS = Number.EPSILON;
  const VANISHING = 1e-8; // scale.py: share of the mean squared length that a vanishing row is given
  const CONDITION = 1e-3; // choose.py: least singular value at which all constant rows are used
  const [TOUCH, BREAK] = [0.01, 0.2]; // foresight.py
  const [GOOD, NEAR, FAR, EXACT, QUICK, SAFE, CAREFUL] = [0.75, 0.01, 1, 0.02, 0.03, 1e-10, 1e-3]; // damping.py
  const FLOOR = 1e-12; // damping.py: least damping of an annealed rule
  const SHORTEST = 1e-3; // stopping.py, as all below
  const ROUNDING = 256 * EPS;
  const NEGLIGIBLE = EPS ** 0.6;
  const [LOOK, PROGRESS, SMALL, RUNAWAY] = [40, 0.9, 1e-3, 1e8];

  const norm = ([x, y]) => Math.hypot(x, y);
  const values = (duals) => duals.map((dual) => dual.v);
  const worstOf = (residuals) => residuals.reduce((worst, r) => Math.max(worst, Math.abs(r)), 0); // NaN stays NaN

  /** g and J of all rows at a point of dual numbers. */
  function evaluate(set, [p, q]) {
    const along = (slopeX, slopeY) => [slopeX * p.a + slopeY * q.a, slopeX * p.b + slopeY * q.b];
    return set.rows.map((row) => {
      const [v, x, y, xx, xy, yy] = row.at(p.v, q.v);
      return { g: new Dual(v, ...along(x, y)), J: [new Dual(x, ...along(xx, xy)), new Dual(y, ...along(xy, yy))] };
    });
  }

  /** r of each row; one inside its bounds is 0, and so is its derivative. */
  const residuals = (set, rows) =>
    set.rows.map((row, i) => {
      const r = outside(rows[i].g.v, row);
      return r === 0 && !row.equality ? ZERO : new Dual(r, rows[i].g.a, rows[i].g.b);
    });

  const squaredLength = ([a, b]) => a.times(a).plus(b.times(b));

  /** D: squared lengths of the rows at ŷ for a relative damping, else 1. */
  function scales(rows, relative) {
    if (!relative) return rows.map(() => new Dual(1));
    const lengths = rows.map(({ J }) => squaredLength(J));
    const mean = lengths.reduce((sum, length) => sum.plus(length), ZERO).scaled(1 / rows.length);
    const least = mean.v > 0 ? mean.scaled(VANISHING) : new Dual(1);
    return lengths.map((length) => (length.v < least.v ? least : length));
  }

  /** Are all rows constant and used by every step? Then the library iterates on A y with one spectrum. */
  function frozen(set, rows) {
    if (!set.linear || rows === "active") return false;
    if (rows === "all") return true;
    if (set.rows.length > 2) return false; // dependent in the plane
    if (set.rows.length === 1) return true;
    const [[a, b], [c, d]] = set.rows.map(({ at }) => unit(at(0, 0).slice(1, 3)));
    const cosine = Math.min(1, Math.abs(a * c + b * d)); // of unit rows: singular values √(1 ± cosine)
    return Math.sqrt(1 - cosine) >= CONDITION;
  }

  const unit = (v) => v.map((entry) => entry / norm(v));

  /** d that minimises |A d − q|² + λ |d|² over rows a of A, by Cramer's rule.
   *
   * With c_ij = a_i × a_j and a⊥ = (−a_y, a_x), the determinant of AᵀA + λI is λ² + λ Σ|a_i|² + Σ c_ij² (Cauchy-Binet):
   * a sum of squares, so that nothing cancels however small λ is.
   */
  function dampedStep(a, q, damping) {
    let [x, y, length, cross] = [ZERO, ZERO, ZERO, ZERO];
    for (let i = 0; i < a.length; i++) {
      x = x.plus(a[i][0].times(q[i]).scaled(damping));
      y = y.plus(a[i][1].times(q[i]).scaled(damping));
      length = length.plus(squaredLength(a[i]));
      for (let j = i + 1; j < a.length; j++) {
        const c = a[i][0].times(a[j][1]).minus(a[i][1].times(a[j][0]));
        x = x.plus(c.times(q[i].times(a[j][1]).minus(q[j].times(a[i][1]))));
        y = y.plus(c.times(q[j].times(a[i][0]).minus(q[i].times(a[j][0]))));
        cross = cross.plus(c.times(c));
      }
    }
    const determinant = cross.plus(length.scaled(damping)).shifted(damping * damping);
    return [x.over(determinant), y.over(determinant)];
  }

  /** q − A d, the residuals that the linear model foresees; of up to two rows as λ (A Aᵀ + λI)⁻¹ q, which is exact. */
  function foreseen(a, q, d, damping) {
    const dot = (u, v) => u[0] * v[0] + u[1] * v[1];
    if (a.length === 1) return [(damping * q[0]) / (dot(a[0], a[0]) + damping)];
    if (a.length > 2) return a.map((row, i) => q[i] - dot(row, d));
    const [first, second, mixed] = [dot(a[0], a[0]) + damping, dot(a[1], a[1]) + damping, dot(a[0], a[1])];
    const cross = a[0][0] * a[1][1] - a[0][1] * a[1][0];
    const share = damping / (cross * cross + damping * (first + second - damping));
    return [share * (second * q[0] - mixed * q[1]), share * (first * q[1] - mixed * q[0])];
  }

  /** One step from a point: where it leads, its length, and the residuals that it foresees. */
  function step(point, rows, r, used, D, damping) {
    const index = rows.map((_, i) => i).filter((i) => used[i]);
    const roots = index.map((i) => D[i].root());
    const a = index.map((i, k) => rows[i].J.map((entry) => entry.over(roots[k])));
    const q = index.map((i, k) => r[i].over(roots[k]));
    const d = dampedStep(a, q, damping);
    const left = rows.map(() => 0);
    foreseen(a.map(values), values(q), values(d), damping).forEach((entry, k) => {
      left[index[k]] = entry * roots[k].v;
    });
    return { trial: [point[0].minus(d[0]), point[1].minus(d[1])], d: values(d), left };
  }

  /** The damping rule: {relative, paced, first(distance), following(k, level, gain, distance)}. */
  function rule({ kind, value, start, ratio }, curved) {
    if (kind === "constant") return { relative: false, paced: false, first: () => value, following: () => value };
    const at = (k) => Math.max(FLOOR, start * ratio ** k);
    const schedule = { relative: true, paced: false, first: () => at(0), following: (k) => at(k + 1) };
    if (kind === "schedule" || !curved || ratio >= 1) return schedule;
    return { relative: true, paced: true, first: (distance) => first(start, ratio, distance), following: pace(start, ratio) };
  }

  function first(start, ratio, distance) {
    const fall = Math.log(ratio);
    const jumps = Math.ceil(Math.log(Math.min(1, Math.max(2.2250738585072014e-308 ** 0.25, distance))) * (2 / fall));
    return Math.max(FLOOR, Math.exp(jumps * fall) * start);
  }

  const pace = (start, ratio) => (k, level, gain, distance) => {
    const lower = level * ratio;
    const quick = Math.max(SAFE, level * Math.min(QUICK, ratio));
    const right = (gain > GOOD && distance < NEAR) || (Math.abs(gain - 1) < EXACT && distance < FAR);
    return Math.max(FLOOR, first(start, ratio, distance) * CAREFUL, right ? Math.min(lower, quick) : lower);
  };

  /** How far away the bounds are, by the lengths of their rows, in sizes of the point. */
  function distance(point, r, D) {
    const size = Math.sqrt((point[0].v ** 2 + point[1].v ** 2) / 2);
    return size > 0 ? worstOf(r.map((entry, i) => entry.v / Math.sqrt(D[i].v))) / size : Infinity;
  }

  const merit = (r, D) => r.reduce((sum, entry, i) => sum + entry ** 2 / D[i].v, 0);

  /** Actual over foreseen decrease of the squared violation. */
  function gain(before, after, left, used, D) {
    const expected = left.map((entry, i) => (used[i] ? entry : 0));
    const was = merit(before, D);
    return (was - merit(after, D)) / Math.abs(was - merit(expected, D));
  }

  /** The rows of a step that would break others: these with their slacks, less those whose multipliers point inwards. */
  function foresee(set, rows, r, used, { d, left }, D) {
    const lengths = D.map(({ v }) => Math.sqrt(v));
    const ahead = rows.map(({ g, J }) => g.v - J[0].v * d[0] - J[1].v * d[1]);
    const beyond = ahead.map((g, i) => Math.abs(outside(g, set.rows[i])));
    const taken = beyond.map((far, i) => !used[i] && far > TOUCH * norm(d) * lengths[i]);
    const fresh = worstOf(beyond.map((far, i) => (taken[i] ? far / lengths[i] : 0)));
    if (!(fresh > BREAK * worstOf(r.map((entry, i) => entry.v / lengths[i])))) return null;
    const inward = r.map((entry, i) => used[i] && !set.rows[i].equality && left[i] * entry.v <= 0);
    const slack = (i) => rows[i].g.shifted(-(ahead[i] > set.rows[i].upper ? set.rows[i].upper : set.rows[i].lower));
    return {
      taken,
      used: used.map((mine, i) => (mine && !inward[i]) || taken[i]),
      r: r.map((entry, i) => (taken[i] ? slack(i) : inward[i] ? ZERO : entry)),
    };
  }

  /** Is the gradient of the scaled violation nothing beside it, so that no step can help? */
  function stationary(rows, r, D, d, damping) {
    const size = Math.sqrt(merit(values(r), D));
    if (!(norm(d) * (r.length + damping) <= NEGLIGIBLE * size)) return false;
    const weights = r.map((entry, i) => entry.v / D[i].v);
    const gradient = [0, 1].map((axis) => rows.reduce((sum, { J }, i) => sum + J[axis].v * weights[i], 0));
    return norm(gradient) <= NEGLIGIBLE * size;
  }

  /** How much stricter than the tolerance to be with short rows. */
  function strictness(D, relative, tol) {
    const shortest = tol ? Math.max(SHORTEST, Math.min(1, ROUNDING / tol)) : 1;
    return D.map(({ v }) => (relative ? 1 / Math.min(1, Math.max(shortest, Math.sqrt(v))) : 1));
  }

  /** What stays the same from step to step. */
  function prepare(set, rows, options) {
    const whole = frozen(set, options.rows);
    const damping = rule(options.damping, set.curved);
    const { tol } = options;
    const D = scales(rows, damping.relative);
    return {
      set, whole, damping, D, tol,
      active: !whole && options.rows !== "all",
      strict: strictness(D, damping.relative, tol),
      aim: whole ? Math.max(tol / 2, tol - ROUNDING) : tol,
    };
  }

  /** Where the repair stands before its first step. */
  function begin({ set, damping, D, tol }, point, rows) {
    const r = residuals(set, rows);
    const worst = worstOf(values(r));
    return {
      point, rows, r, worst,
      steps: 0, mark: Infinity, best: { point, seen: worst },
      level: damping.first(distance(point, r, D)),
      status: worst <= tol ? "converged" : worst < Infinity ? "going" : "nonfinite",
    };
  }

  /** The next step: its rows, which are violated ones, equalities and those that it would break, and where it leads. */
  function next({ set, active, damping, D }, { point, rows, r, level }) {
    const used = r.map((entry, i) => entry.v !== 0 || set.rows[i].equality);
    const first = step(point, rows, r, active ? used : used.map(() => true), D, level);
    const other = damping.paced && active ? foresee(set, rows, r, used, first, D) : null;
    if (!other) return { ...first, r, used, taken: used.map(() => false) };
    return { ...step(point, rows, other.r, other.used, D, level), ...other };
  }

  /** Is it time to look at the progress? With a large damping none is expected yet. */
  function looks({ whole, tol, damping }, { steps, level }) {
    const due = tol > 0 && !whole && steps > 0 && steps % LOOK === 0;
    return due && damping.relative && (damping.paced || level <= SMALL);
  }

  /** Where it stands after one more step. */
  function advance(course, s) {
    const { set, whole, damping, D, strict, aim, tol } = course;
    const { trial, d, left, used, r: before } = next(course, s);
    const rows = evaluate(set, trial);
    const r = residuals(set, rows);
    const worst = worstOf(r.map((entry, i) => entry.v * strict[i]));
    const steps = s.steps + 1;
    if (!(worst < Infinity)) return { ...s, steps, status: "nonfinite" };
    const look = looks(course, s);
    const stalled = (look && s.best.seen > PROGRESS * s.mark) || (!whole && stationary(s.rows, before, D, d, s.level));
    const pace = damping.paced ? [gain(values(before), values(r), left, used, D), distance(s.point, before, D)] : [];
    const seen = worstOf(values(r));
    return {
      point: trial, rows, worst, steps, r,
      level: damping.following(s.steps, s.level, ...pace), mark: look ? s.best.seen : s.mark,
      best: seen < s.best.seen || tol === 0 ? { point: trial, seen } : s.best,
      status: worst <= aim ? "converged" : stalled ? "stalled" : "going",
    };
  }

  /** What the page shows of where the repair stands. */
  function shown(course, s) {
    const { set, active } = course;
    const g = s.rows.map((row) => row.g.v);
    const violation = worstOf(g.map((value, i) => outside(value, set.rows[i])));
    const none = g.map(() => false);
    const { used, taken } = s.status === "going" ? next(course, s) : { used: none, taken: none };
    const all = s.status === "going" && !active;
    return { point: values(s.point), g, violation, damping: s.level, used: all ? g.map(() => true) : used, taken };
  }

  /** The repair of ŷ, from `start`, which is ŷ or a point of dual numbers that was computed from it.
   *
   * Options: damping {kind: "pace" | "schedule" | "constant", start, ratio, value}, rows "auto" | "all" | "active",
   * tol, maxSteps. Returns {value, jacobian, status, steps, violation, path}. An entry of the path is a point before a
   * step, with the step's damping and rows, {point, g, violation, damping, used, taken}; the last is where it stopped.
   */
  function repair(set, prediction, options, start = Dual.point(prediction)) {
    const rows = evaluate(set, start);
    const course = prepare(set, rows, options);
    let s = begin(course, start, rows);
    const path = [shown(course, s)];
    while (s.status === "going" && s.steps < options.maxSteps) {
      s = advance(course, s);
      path.push(shown(course, s));
    }
    return outcome(set, s, options.tol, path);
  }

  /** What comes back: the last point if it converged, else the best one that was seen. */
  function outcome(set, s, tol, path) {
    const point = s.status === "converged" ? s.point : s.best.point;
    const violation = Explorer.sets.violation(set, values(point));
    const far = worstOf(values(s.point)) > RUNAWAY * (1 + worstOf(values(s.best.point)));
    const lost = s.status !== "converged" && (far || s.worst > RUNAWAY * s.best.seen);
    const left = s.status === "stalled" || s.status === "nonfinite" ? s.status : "max steps";
    const status = violation <= tol ? "converged" : lost ? "nonfinite" : left;
    return { value: values(point), jacobian: Explorer.jacobianOf(point), status, steps: s.steps, violation, path };
  }

  Object.assign(Explorer, { repair, evaluate, residuals });
})();
