/* What one sees, in sentences, from the numbers. */
"use strict";
(() => {
  const ONTO_BOUND = 1e-6; // how near its bound a row is at y̌ that counts as active there, in units of its gradient

  /** A number as one reads it: 0.0123, 12.3, 1.2e-9. */
  function plain(value) {
    if (value === 0) return "0";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : value < 0 ? "−∞" : "–";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e5) {
      return value.toExponential(1).replace(".0e", "e").replace("e+", "e").replaceAll("-", "−");
    }
    return String(Number(value.toPrecision(3))).replace("-", "−");
  }

  const fixed = (value) => {
    if (!(Math.abs(value) < 1000)) return plain(value);
    return value.toFixed(Math.abs(value) < 10 ? 3 : 1).replace(/^-(0\.000)$/, "$1").replace("-", "−");
  };
  const point = ([x, y]) => `(${fixed(x)}, ${fixed(y)})`;
  const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

  /** Indices of the rows that are at a bound at a point. */
  function activeAt(set, [x, y], tol) {
    const found = [];
    set.rows.forEach((row, i) => {
      const [v, gx, gy] = row.at(x, y);
      const near = Math.max(ONTO_BOUND * Math.hypot(gx, gy), 2 * tol);
      if (Math.abs(v - row.lower) <= near || Math.abs(v - row.upper) <= near) found.push(i);
    });
    return found;
  }

  function ofRepair({ state, result, prediction }) {
    const { status, steps, violation } = result;
    if (status === "converged" && steps === 0) {
      return prediction === 0
        ? "ŷ is in the set, so nothing moves: y̌ = ŷ, and the whole gradient arrives."
        : "The start, the nearest point, is in the set, so no step is needed.";
    }
    if (status === "converged") return `The repair reaches the set in ${count(steps, "step")}.`;
    if (prediction === Infinity) return "A row is not a number at ŷ, so there is nothing to repair: y̌ = ŷ.";
    const best = `y̌, the best point that it saw, is outside by ${plain(violation)}.`;
    if (status === "stalled") return `After ${count(steps, "step")} no step helps any more: ${best}`;
    if (status === "nonfinite") return `The repair ran away: ${best}`;
    return `The limit of ${count(state.maxSteps, "step")} came first: ${best}`;
  }

  function ofDistance({ state, result, answers, prediction }) {
    const { nearest } = answers;
    if (prediction === 0 || !nearest || nearest.why || result.status !== "converged") return "";
    const far = (value) => Math.hypot(value[0] - state.hat[0], value[1] - state.hat[1]);
    const [own, least] = [far(result.value), far(nearest.value)];
    if (own - least < 1e-6 * (1 + least)) return "y̌ is the nearest point of the set.";
    return `y̌ is ${plain(own)} away from ŷ, the nearest point ${plain(least)}.`;
  }

  function portion(share) {
    if (share < 1e-9) return "nothing";
    if (share < 0.001) return "hardly anything";
    return share > 1.05 ? `${plain(share)} times its length` : `${Math.round(100 * share)} %`;
  }

  function ofGradient({ set, state, result, loss, pulled, prediction }) {
    if (prediction === 0 || result.status !== "converged") return "";
    const [before, after] = [Math.hypot(...loss.gradient), Math.hypot(...pulled)];
    if (before < 1e-9) return "The loss is at its minimum: there is no gradient.";
    const active = activeAt(set, result.value, state.tol);
    const names = new Intl.ListFormat("en").format(active.map((i) => String(i + 1)));
    const who = active.length === 1 ? `Row ${names} is` : `Rows ${names} are`;
    const where = active.length ? `${who} at ${active.length === 1 ? "its bound" : "their bounds"}: ` : "";
    const text = `${where}of the gradient at y̌ ${portion(after / before)} arrives at ŷ.`;
    return text[0].toUpperCase() + text.slice(1);
  }

  const sentences = (scene) => [ofRepair, ofDistance, ofGradient].map((say) => say(scene)).filter(Boolean).join(" ");

  Explorer.words = { plain, point, sentences };
})();
