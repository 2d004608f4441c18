/* The controls: each one writes an entry of the state, and shows what is there. */
"use strict";
(() => {
  const { plain } = Explorer.words;
  const find = (id) => document.getElementById(id);

  // sliders: the entry of the state, and the way from the slider's position to it and back
  const same = [(position) => position, (value) => value];
  const decades = [(position) => Number((10 ** position).toPrecision(3)), (value) => Math.log10(value)];
  const SLIDERS = {
    "start-damping": ["begin", ...decades],
    ratio: ["ratio", ...same],
    constant: ["constant", ...decades],
    tol: ["tol", (position) => Number(`1e${position}`), (value) => Math.round(Math.log10(value))],
    "max-steps": ["maxSteps", ...same],
  };
  const RADIOS = ["damping", "rows", "start", "loss"];

  class Controls {
    /** `change(entries)` is called with new entries of the state. */
    constructor(change) {
      const own = new Option("Your own formula", "own");
      find("set").append(...Explorer.sets.CATALOGUE.map(({ id, name }) => new Option(name, id)), own);
      find("set").addEventListener("change", (event) => this.choose(event.target.value, change));
      find("formula").addEventListener("input", (event) => change({ set: "own", text: event.target.value }));
      find("field-kind").addEventListener("change", (event) => change({ field: event.target.value }));
      for (const [id, [key, into]] of Object.entries(SLIDERS)) {
        find(id).addEventListener("input", (event) => change({ [key]: into(Number(event.target.value)) }));
      }
      for (const name of RADIOS) {
        for (const radio of document.getElementsByName(name)) {
          radio.addEventListener("change", () => change({ [name]: radio.value }));
        }
      }
    }

    choose(id, change) {
      if (id === "own") {
        change({ set: "own", text: find("formula").value });
        find("formula").focus();
      } else change({ set: id, text: "" });
    }

    /** Brings the controls to a state; `text` are the rows of its set. */
    show(state, text, error) {
      find("set").value = state.set;
      const formula = find("formula");
      if (formula.value !== text) formula.value = text;
      formula.rows = Math.max(2, Math.min(8, text.split("\n").length));
      formula.setAttribute("aria-invalid", String(Boolean(error)));
      find("error").textContent = error;
      find("field-kind").value = state.field;
      for (const [id, [key, , back]] of Object.entries(SLIDERS)) {
        find(id).value = back(state[key]);
        find(id).parentElement.querySelector("output").textContent = plain(state[key]);
      }
      for (const name of RADIOS) {
        for (const radio of document.getElementsByName(name)) radio.checked = radio.value === state[name];
      }
      for (const slider of document.querySelectorAll("[data-for]")) {
        slider.hidden = (slider.dataset.for === "constant") !== (state.damping === "constant");
      }
    }
  }

  Explorer.Controls = Controls;
})();
