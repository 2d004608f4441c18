// What a run's page does beyond its HTML: values under the pointer, and the details of the instance that was picked.
"use strict";

// Values: the mark nearest to the pointer is shown, with its title beside it.
const REACH = 24; // pixels from the pointer to a point
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip", hidden: true }));

function distance(mark, x, y) {
  const box = mark.getBoundingClientRect();
  if (mark.tagName === "rect") return x >= box.left && x <= box.right && y <= box.bottom && y >= box.top ? 0 : Infinity;
  return Math.hypot(x - (box.left + box.right) / 2, y - (box.top + box.bottom) / 2);
}

function nearest(marks, x, y) {
  let [found, least] = [null, REACH];
  for (const mark of marks) {
    const away = distance(mark, x, y);
    if (away < least) [found, least] = [mark, away];
  }
  return found;
}

for (const drawing of document.querySelectorAll(".drawing")) {
  const marks = [...drawing.querySelectorAll(".marks > *")];
  for (const mark of marks) { // the browser's own title would come late, on top of ours
    const title = mark.querySelector("title");
    mark.dataset.text = title.textContent;
    title.remove();
  }
  let shown = null;
  const show = (mark) => {
    if (shown) shown.classList.remove("near");
    shown = mark;
    tip.hidden = !mark;
    if (!mark) return;
    mark.classList.add("near");
    tip.textContent = mark.dataset.text;
    const box = mark.getBoundingClientRect();
    const left = (box.left + box.right - tip.offsetWidth) / 2;
    const most = document.documentElement.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${scrollX + Math.max(4, Math.min(left, most))}px`;
    tip.style.top = `${scrollY + box.top - tip.offsetHeight - 4}px`;
  };
  for (const kind of ["pointermove", "pointerdown"])
    drawing.addEventListener(kind, (event) => show(nearest(marks, event.clientX, event.clientY)));
  drawing.addEventListener("pointerleave", () => show(null));
  drawing.addEventListener("click", () => shown && shown.dataset.pick && pick(Number(shown.dataset.pick)));
}

// Instances: the slider, its buttons, the arrow keys on it, and clicks in the figure pick one.
const FEW = 10; // lines of a table before all are asked for
const store = document.getElementById("closeups");
const instances = store ? JSON.parse(store.textContent) : [];
const slider = document.getElementById("rank");

function number(value) {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-3 && size < 9999.5)) return String(Number(value.toPrecision(4)));
  return value.toExponential(2).replace("+", "");
}

function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function line(label, cells) {
  const row = element("tr");
  row.append(element("th", label, { scope: "row" }), ...cells);
  return row;
}

const cell = (value, attributes = {}) => element("td", number(value), { "data-value": value, ...attributes });

/** A table whose first lines are there, and the others behind a button. */
function table(title, headings, lines) {
  const made = element("table"), head = element("thead"), body = element("tbody"), row = element("tr");
  row.append(...headings.map((text) => element("th", text, { scope: "col" })));
  head.append(row);
  body.append(...lines.slice(0, FEW));
  made.append(element("caption", title), head, body);
  if (lines.length <= FEW) return [made];
  const more = element("button", `${lines.length - FEW} more`, { type: "button" });
  more.addEventListener("click", () => { body.append(...lines.slice(FEW)); more.remove(); });
  return [made, more];
}

/** A move as a line from the prediction, in the middle, to the output; the longest of an instance reach the edge. */
function strip(moved, longest) {
  const make = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const end = `${50 + 45 * (longest > 0 ? moved / longest : 0)}%`;
  const drawn = make("svg", { class: "strip", "aria-hidden": "true" });
  drawn.append(
    make("line", { x1: "50%", x2: end, y1: "50%", y2: "50%" }),
    make("circle", { class: "before", cx: "50%", cy: "50%", r: 3 }),
    make("circle", { class: "after", cx: end, cy: "50%", r: 3 }),
  );
  const holder = element("td");
  holder.append(drawn);
  return holder;
}

function movesTable({ moves, counts }) {
  const longest = Math.max(...moves.map(([, , , moved]) => Math.abs(moved)));
  const lines = moves.map(([index, before, after, moved]) =>
    line(`y${index}`, [cell(before), cell(after), cell(moved), strip(moved, longest)]));
  const some = moves.length < counts.moves ? `, the first ${moves.length} of ${counts.moves}` : "";
  return table(`Variables by how far they moved${some}`, ["", "ŷ", "y̌", "y̌ − ŷ", ""], lines);
}

function bounds(lower, upper) {
  if (lower === upper) return `= ${number(lower)}`;
  if (lower === null) return `≤ ${number(upper)}`;
  return upper === null ? `≥ ${number(lower)}` : `${number(lower)} to ${number(upper)}`;
}

function rowsTable({ rows, counts }) {
  const lines = rows.map(([index, lower, upper, before, over, after, side, multiplier]) =>
    line(`g${index}`, [
      element("td", bounds(lower, upper)), cell(before), cell(over && Math.abs(over), over ? { class: "off" } : {}),
      cell(after), side === "inside" ? element("td", "inside") : cell(multiplier),
    ]));
  const some = rows.length < counts.rows ? `; the first ${rows.length}` : "";
  const title = `Rows: ${counts.violated} violated by ŷ, ${counts.active} at a bound at y̌${some}`;
  return table(title, ["", "bound", "g(ŷ)", "violation", "g(y̌)", "μ"], lines);
}

function numbersTable(one) {
  const said = {
    gap: "gap f(y̌) − f*", objective: "objective f(y̌)", distance: "distance ‖y̌ − ŷ‖", predicted: "largest violation of ŷ",
    violation: "largest violation of y̌", steps: "steps of the repair", residual: "KKT residual of y̌",
  };
  const lines = Object.entries(said).filter(([name]) => one[name] !== undefined && one[name] !== null);
  return [element("caption", `Instance ${one.instance}, rank ${one.rank}`),
    ...lines.map(([name, text]) => line(text, [cell(one[name], { "data-name": name })]))];
}

function pick(k) {
  slider.value = k;
  slider.setAttribute("aria-valuetext", `instance ${instances[k].instance}, rank ${instances[k].rank}`);
  document.getElementById("numbers").replaceChildren(...numbersTable(instances[k]));
  document.getElementById("moves").replaceChildren(...movesTable(instances[k]));
  document.getElementById("rows").replaceChildren(...rowsTable(instances[k]));
  for (const mark of document.querySelectorAll("[data-pick]"))
    mark.classList.toggle("picked", Number(mark.dataset.pick) === k);
}

if (instances.length) {
  const step = (by) => pick(Math.max(0, Math.min(instances.length - 1, Number(slider.value) + by)));
  document.getElementById("how").textContent = "Pick one with the slider, or with a click in the figure.";
  document.getElementById("picked").hidden = false;
  slider.addEventListener("input", () => pick(Number(slider.value)));
  document.getElementById("previous").addEventListener("click", () => step(-1));
  document.getElementById("next").addEventListener("click", () => step(1));
  pick(0);
}
