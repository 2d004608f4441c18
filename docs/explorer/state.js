/* What the page shows, as one object, and its way into the URL's hash and back.
 *
 * Numbers of dragged points are rounded to 0.001, so that a link restores exactly what was seen.
 */
"use strict";
(() => {
  const CHOICES = {
    damping: ["pace", "schedule", "constant"],
    rows: ["auto", "active", "all"],
    start: ["prediction", "nearest"],
    loss: ["square", "distance", "linear"],
    field: ["none", "arrows", "landing", "steps", "gradient"],
  };
  const NUMBERS = { begin: [1e-6, 1e6], ratio: [0.01, 1], constant: [1e-9, 1e6], tol: [1e-14, 1], maxSteps: [1, 500] };
  const POINTS = ["hat", "target"];
  const ZOOMS = [0.8, 1.6, 3.2, 6.4];
  const METHODS = ["nearest", "hardnet", "dc3"];

  const DEFAULTS = {
    set: "ring", text: "", hat: [0.4, 0.25], target: [2.6, 1.4],
    damping: "pace", begin: 10, ratio: 0.6, constant: 0.01,
    rows: "auto", start: "prediction", tol: 1e-8, maxSteps: 100,
    loss: "square", field: "none", half: 3.2, show: ["nearest", "hardnet", "dc3"], preset: "",
  };

  const rounded = (value) => Math.round(value * 1000) / 1000;

  /** The state as a hash, without what is as by default. */
  function toHash(state) {
    const hash = new URLSearchParams();
    for (const [key, value] of Object.entries(state)) {
      const words = Array.isArray(value) ? value.join(",") : String(value);
      const usual = Array.isArray(DEFAULTS[key]) ? DEFAULTS[key].join(",") : String(DEFAULTS[key]);
      if (words !== usual && !(key === "text" && state.set !== "own")) hash.set(key, words);
    }
    return `#${hash}`;
  }

  /** The state of a hash; whatever cannot be read is as by default. */
  function fromHash(text) {
    const hash = new URLSearchParams(text.replace(/^#/, ""));
    const state = { ...DEFAULTS };
    const known = [...Explorer.sets.CATALOGUE.map(({ id }) => id), "own"];
    if (known.includes(hash.get("set"))) state.set = hash.get("set");
    if (state.set === "own") state.text = hash.get("text") || "";
    for (const [key, choices] of Object.entries(CHOICES)) {
      if (choices.includes(hash.get(key))) state[key] = hash.get(key);
    }
    for (const [key, [least, most]] of Object.entries(NUMBERS)) {
      const value = Number(hash.get(key));
      if (hash.has(key) && value >= least && value <= most) state[key] = key === "maxSteps" ? Math.round(value) : value;
    }
    for (const key of POINTS) {
      const point = (hash.get(key) || "").split(",").map(Number);
      const valid = point.length === 2 && point.every((entry) => Math.abs(entry) <= 20);
      if (hash.has(key) && valid) state[key] = point.map(rounded);
    }
    if (ZOOMS.includes(Number(hash.get("half")))) state.half = Number(hash.get("half"));
    if (hash.has("show")) state.show = METHODS.filter((method) => hash.get("show").split(",").includes(method));
    state.preset = hash.get("preset") || "";
    return state;
  }

  /** The options of a repair. */
  const optionsOf = ({ damping, begin, ratio, constant, rows, tol, maxSteps }) => ({
    damping: { kind: damping, start: begin, ratio, value: constant }, rows, tol, maxSteps,
  });

  /** L and ∂L/∂y̌ at y̌. */
  function lossOf({ loss, target }, [x, y]) {
    const [dx, dy] = [x - target[0], y - target[1]];
    const far = Math.hypot(dx, dy);
    if (loss === "square") return { value: 0.5 * far * far, gradient: [dx, dy] };
    if (loss === "linear") return { value: x * target[0] + y * target[1], gradient: [...target] };
    return { value: far, gradient: far > 0 ? [dx / far, dy / far] : [0, 0] };
  }

  Explorer.state = { DEFAULTS, ZOOMS, METHODS, toHash, fromHash, rounded, optionsOf, lossOf };
})();
