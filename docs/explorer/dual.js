/* Dual numbers with two dual parts: v + a ε₁ + b ε₂, where ε₁ and ε₂ follow the two entries of ŷ.
 *
 * Arithmetic on them is the chain rule, so that whatever is computed from ŷ carries its exact derivative:
 * (v, a, b) = (value, ∂/∂ŷ₁, ∂/∂ŷ₂). The repair, the projection and the rivals all work on them.
 */
"use strict";
var Explorer = globalThis.Explorer || (globalThis.Explorer = {});

Explorer.Dual = class Dual {
  constructor(v, a = 0, b = 0) {
    this.v = v;
    this.a = a;
    this.b = b;
  }

  /** The two entries of ŷ, the variables that everything is differentiated in. */
  static point([x, y]) {
    return [new Dual(x, 1, 0), new Dual(y, 0, 1)];
  }

  plus(o) {
    return new Dual(this.v + o.v, this.a + o.a, this.b + o.b);
  }

  minus(o) {
    return new Dual(this.v - o.v, this.a - o.a, this.b - o.b);
  }

  times(o) {
    return new Dual(this.v * o.v, this.a * o.v + this.v * o.a, this.b * o.v + this.v * o.b);
  }

  over(o) {
    const v = this.v / o.v;
    return new Dual(v, (this.a - v * o.a) / o.v, (this.b - v * o.b) / o.v);
  }

  /** This by a plain number. */
  scaled(factor) {
    return new Dual(this.v * factor, this.a * factor, this.b * factor);
  }

  /** This and a plain number. */
  shifted(term) {
    return new Dual(this.v + term, this.a, this.b);
  }

  root() {
    const v = Math.sqrt(this.v);
    const slope = v > 0 ? 0.5 / v : 0;
    return new Dual(v, this.a * slope, this.b * slope);
  }

  /** The same value, a constant to the derivative. */
  detached() {
    return new Dual(this.v);
  }
};

Explorer.ZERO = new Explorer.Dual(0);

/** The matrix [[∂p₁/∂ŷ₁, ∂p₁/∂ŷ₂], [∂p₂/∂ŷ₁, ∂p₂/∂ŷ₂]] of a point of two dual numbers. */
Explorer.jacobianOf = ([p, q]) => [[p.a, p.b], [q.a, q.b]];

/** The cotangent v of a point pulled back to ŷ: Jᵀ v. */
Explorer.pullBack = (jacobian, [v, w]) => [
  jacobian[0][0] * v + jacobian[1][0] * w,
  jacobian[0][1] * v + jacobian[1][1] * w,
];
