/* The page: one state; whatever changes it leads to one look at everything. */
"use strict";
(() => {
  const { Plane, Chart, Field, Controls, Dual, tables, presets, words, sets } = Explorer;
  const { toHash, fromHash, rounded, optionsOf, lossOf, DEFAULTS, ZOOMS } = Explorer.state;
  const find = (id) => document.getElementById(id);
  const FRAME = 90; // milliseconds a step while it plays
  const APART = ["hat", "target", "show", "preset"]; // entries that leave the field as it is

  const page = {
    state: fromHash(location.hash), set: null, error: "", shown: Infinity, // Infinity: the last step
    plane: new Plane(find("drawing"), (handle, point) => change({ [handle]: point.map(rounded) })),
    chart: new Chart(find("chart"), (step) => look({ shown: step })),
    field: new Field(find("field"), find("field-legend")),
    controls: new Controls((entries) => change("set" in entries ? { ...entries, preset: "" } : entries)),
  };

  const textOf = ({ set, text }) => (set === "own" ? text : sets.CATALOGUE.find(({ id }) => id === set).text);

  /** Reads the rows of the state; what cannot be read leaves the last set in place. */
  function readSet() {
    const text = textOf(page.state);
    try {
      if (!page.set || page.set.text !== text) page.set = sets.read(text);
      page.error = "";
    } catch (error) {
      if (!(error instanceof Explorer.formula.FormulaError)) throw error;
      page.error = error.message;
      page.set = page.set || sets.read(textOf(DEFAULTS));
    }
  }

  /** The repair of a prediction, from where the state wants it to begin. */
  function solve(prediction) {
    const projected = page.state.start === "nearest" ? Explorer.nearest(page.set, prediction) : null;
    return Explorer.repair(page.set, prediction, optionsOf(page.state), projected || Dual.point(prediction));
  }

  function projection(set, prediction) {
    const found = Explorer.nearest(set, prediction);
    if (!found && sets.violation(set, prediction) === Infinity) return { why: "not sought: a row is not a number at ŷ" };
    if (!found) return { why: "no point of the set was found within 8 of the origin" };
    const value = found.map(({ v }) => v);
    return { value, jacobian: Explorer.jacobianOf(found), violation: sets.violation(set, value) };
  }

  /** Everything that is shown, computed from the state. */
  function compute() {
    const { state, set } = page;
    const result = solve(state.hat);
    const pullBack = ({ value, jacobian }) => Explorer.pullBack(jacobian, lossOf(state, value).gradient);
    const answers = {
      nearest: projection(set, state.hat),
      hardnet: Explorer.rivals.hardnet(set, state.hat),
      dc3: Explorer.rivals.dc3(set, state.hat),
    };
    return {
      set, state, result, answers, pullBack, loss: lossOf(state, result.value), pulled: pullBack(result),
      prediction: sets.violation(set, state.hat), shown: Math.min(page.shown, result.path.length - 1),
    };
  }

  /** Many predictions, each with the share of its gradient that arrives. */
  function drawField() {
    page.field.draw(page.plane, page.state.field, (prediction) => {
      const { value, jacobian, steps, status } = solve(prediction);
      const { gradient } = lossOf(page.state, value);
      const share = Math.hypot(...Explorer.pullBack(jacobian, gradient)) / Math.hypot(...gradient);
      return { value, steps, status, share: Number.isFinite(share) ? share : 0 };
    });
  }

  function show() {
    const scene = compute();
    page.plane.drawScene(scene);
    page.chart.draw(scene);
    tables.answers(find("answers").tBodies[0], scene, toggle);
    tables.rows(find("rows").tBodies[0], scene);
    tables.notes(find("notes"), scene);
    find("words").textContent = words.sentences(scene);
    const preset = presets.find(({ id }) => id === page.state.preset);
    find("story").textContent = preset ? preset.story : "";
    find("code").textContent = Explorer.program(scene.set, page.state);
    const last = scene.result.path.length - 1;
    Object.assign(find("scrub"), { max: last, value: scene.shown });
    const damping = scene.shown < last ? ` · λ = ${words.plain(scene.result.path[scene.shown].damping)}` : "";
    find("shown").textContent = `step ${scene.shown} of ${last}${damping}`;
  }

  let waiting = false;
  let stale = new Set();

  /** Draws what the changed entries touch, once a frame. */
  function draw() {
    waiting = false;
    readSet();
    page.controls.show(page.state, textOf(page.state), page.error);
    for (const button of find("presets").children) {
      button.setAttribute("aria-pressed", button.dataset.id === page.state.preset);
    }
    const resized = page.plane.measure(page.state.half);
    const reset = resized || page.plane.drawn !== page.set;
    if (reset) page.plane.drawSet(page.set);
    page.plane.drawn = page.set;
    const aimed = page.state.field === "gradient" && stale.has("target");
    if (reset || aimed || [...stale].some((key) => !APART.includes(key))) drawField();
    stale = new Set();
    show();
    remember();
  }

  function look({ shown }) {
    page.shown = shown;
    schedule();
  }

  function schedule() {
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  }

  /** New entries of the state; the last step is shown again. */
  function change(entries) {
    Object.assign(page.state, entries);
    page.shown = Infinity;
    for (const key of Object.keys(entries)) stale.add(key);
    schedule();
  }

  function toggle(method, shown) {
    const wanted = (other) => (other === method ? shown : page.state.show.includes(other));
    change({ show: Explorer.state.METHODS.filter(wanted) });
  }

  let later = 0;

  /** The state in the address, a little later: browsers allow few changes a second. */
  function remember() {
    clearTimeout(later);
    later = setTimeout(() => history.replaceState(null, "", toHash(page.state)), 150);
  }

  /** Shows the steps one after the other; another press stops it. */
  let playing = 0;
  function play() {
    clearInterval(playing);
    if (find("play").textContent === "❚❚") return stop();
    let step = 0;
    find("play").textContent = "❚❚";
    playing = setInterval(() => {
      look({ shown: step });
      step += 1;
      if (step > Number(find("scrub").max)) stop();
    }, FRAME);
    return undefined;
  }

  function stop() {
    clearInterval(playing);
    find("play").textContent = "▶";
  }

  async function copy(button, text) {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy by hand";
    }
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  function zoom(way) {
    const next = ZOOMS[ZOOMS.indexOf(page.state.half) + way];
    if (next) change({ half: next });
  }

  function listen() {
    find("presets").append(...presets.map(({ id, name, state }) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
      button.dataset.id = id;
      button.addEventListener("click", () => {
        change({ ...DEFAULTS, ...state, preset: id });
        button.scrollIntoView({ block: "nearest", inline: "center" });
      });
      return button;
    }));
    find("scrub").addEventListener("input", (event) => look({ shown: Number(event.target.value) }));
    find("play").addEventListener("click", play);
    find("closer").addEventListener("click", () => zoom(-1));
    find("wider").addEventListener("click", () => zoom(1));
    const address = () => location.href.split("#")[0] + toHash(page.state);
    find("share").addEventListener("click", () => copy(find("share"), address()));
    find("copy-code").addEventListener("click", () => copy(find("copy-code"), find("code").textContent));
    find("theme").addEventListener("click", () => {
      const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
        || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
      document.documentElement.dataset.theme = dark ? "light" : "dark";
    });
    addEventListener("hashchange", () => change(fromHash(location.hash)));
    new ResizeObserver(schedule).observe(find("plane"));
  }

  if (!location.hash) Object.assign(page.state, presets[0].state, { preset: presets[0].id });
  listen();
  schedule();
})();
