/* The tables: answers of all methods, and the rows at the step that is shown. */
"use strict";
(() => {
  const { draw, MARKS } = Explorer;
  const { plain, point } = Explorer.words;

  function cell(content, attributes = {}) {
    const node = document.createElement("td");
    node.append(content);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }

  /** A text with the exact numbers behind it. */
  function number(text, attributes) {
    const node = Object.assign(document.createElement("span"), { textContent: text });
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
    return node;
  }

  function row(...cells) {
    const node = document.createElement("tr");
    node.append(...cells);
    return node;
  }

  /** The name of a method with its marker, and a box to show or hide it. */
  function swatch(method, shown, toggled) {
    const label = document.createElement("label");
    label.className = "swatch";
    const icon = draw("svg", { viewBox: "-9 -9 18 18", "aria-hidden": "true" },
      draw("path", { d: MARKS[method].d, style: `fill: ${MARKS[method].colour}` }));
    const box = document.createElement("input");
    Object.assign(box, { type: "checkbox", checked: shown, disabled: method === "repair" });
    box.setAttribute("aria-label", `show ${MARKS[method].name}`);
    box.addEventListener("change", () => toggled(method, box.checked));
    label.append(box, icon, MARKS[method].name);
    return label;
  }

  /** One row a method; `toggled(method, shown)` is called when one is shown or hidden. */
  function answers(body, { state, result, answers: others, pullBack }, toggled) {
    const all = { repair: result, ...others };
    body.replaceChildren(...Object.entries(all).map(([method, answer]) => {
      const name = cell(swatch(method, method === "repair" || state.show.includes(method), toggled));
      if (answer.why) return row(name, cell(answer.why, { class: "why", colspan: 4 }));
      const far = Math.hypot(answer.value[0] - state.hat[0], answer.value[1] - state.hat[1]);
      const exact = answer.violation < 1e-12 ? "0" : plain(answer.violation);
      const gradient = pullBack(answer);
      const where = cell(number(point(answer.value), { "data-answer": method, "data-value": answer.value }));
      where.append(number(point(gradient), { class: "pulled", "data-gradient": method, "data-value": gradient }));
      const steps = answer.steps === undefined ? "–" : String(answer.steps);
      return row(name, where, cell(plain(far)), cell(exact), cell(steps));
    }));
  }

  /** What a row does in the step that is shown. */
  function role(set, i, { g, used, taken }, tol) {
    const { lower, upper, equality } = set.rows[i];
    if (taken[i]) return "taken in: the step would break it";
    const near = Math.min(Math.abs(g[i] - lower), Math.abs(g[i] - upper)) <= tol;
    const place = near ? "at its bound" : g[i] > upper ? "violated above" : g[i] < lower ? "violated below" : "inside";
    return `${equality ? "equality, " : ""}${place}${used[i] ? ", used" : ""}`;
  }

  function rows(body, { set, state, result, shown }) {
    const at = result.path[shown];
    body.replaceChildren(...set.rows.map(({ text }, i) => {
      const node = row(cell(text), cell(plain(at.g[i])), cell(role(set, i, at, state.tol)));
      node.classList.toggle("used", at.used[i]);
      return node;
    }));
  }

  function remarks({ state, answers: { dc3 }, set }) {
    const found = [];
    if (dc3.partial) found.push(`DC3 predicts ${dc3.partial} and completes the other variable by the equality.`);
    else if (!dc3.why && set.rows.some(({ kind, equality }) => equality && kind !== "linear")) {
      found.push("DC3 completes linear equalities; a curved one is approached by gradient steps like any other row.");
    }
    if (!dc3.why && dc3.violation > Explorer.rivals.tolerance) {
      found.push("DC3 has not reached its tolerance of 1e-4 in 20 steps: nothing guarantees that they suffice.");
    }
    if (state.start === "nearest") {
      found.push("The page starts at the exact projection. So does the library on curved rows; on linear ones it " +
        "starts where 35 iterations of ADMM lead, which is nearly there.");
    }
    return found;
  }

  /** Remarks that belong to the answers. */
  function notes(list, scene) {
    const item = (text) => Object.assign(document.createElement("li"), { textContent: text });
    list.replaceChildren(...remarks(scene).map(item));
  }

  Explorer.tables = { answers, rows, notes };
})();
