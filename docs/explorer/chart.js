/* The chart: violation and damping against the step, both on one logarithmic axis. */
"use strict";
(() => {
  const { draw } = Explorer;
  const [LEFT, RIGHT, TOP, BOTTOM] = [46, 10, 8, 22];
  const LEAST = 1e-16; // what a violation of 0 is drawn at

  class Chart {
    /** `chosen(step)` is called when a step is pointed at. */
    constructor(svg, chosen) {
      this.svg = svg;
      const point = ({ clientX }) => {
        if (!this.last) return;
        const share = (clientX - svg.getBoundingClientRect().left - LEFT) / (this.width - LEFT - RIGHT);
        chosen(Math.max(0, Math.min(this.last, Math.round(share * this.last))));
      };
      svg.addEventListener("pointerdown", point);
      svg.addEventListener("pointermove", (event) => event.buttons && point(event));
    }

    draw({ state, result, shown }) {
      const { path } = result;
      this.last = path.length - 1;
      if (!this.last) return this.say("no step was needed");
      Object.assign(this, { width: this.svg.clientWidth, height: this.svg.clientHeight });
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      const violations = path.map(({ violation }) => Math.max(LEAST, violation));
      const dampings = path.slice(0, -1).map(({ damping }) => damping);
      this.range([...violations.filter((v) => v > LEAST), ...dampings, state.tol]);
      const series = (values, kind) => draw("polyline", {
        points: values.map((value, k) => `${this.x(k)},${this.y(value)}`).join(" "), class: `series ${kind}`,
      });
      const dots = violations.map((value, k) =>
        draw("circle", { cx: this.x(k), cy: this.y(value), r: k === shown ? 4.5 : 2.2 }));
      const x = this.x(shown);
      const cursor = draw("line", { x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM, class: "cursor" });
      this.svg.replaceChildren(
        ...this.axes(), ...this.tolerance(state.tol), cursor,
        series(dampings, "damping"), series(violations, "violation"), ...dots, ...this.names(),
      );
      return undefined;
    }

    say(text) {
      const [x, y] = [this.svg.clientWidth / 2, this.svg.clientHeight / 2];
      this.svg.setAttribute("viewBox", `0 0 ${2 * x} ${2 * y}`);
      this.svg.replaceChildren(draw("text", { x, y, "text-anchor": "middle" }, text));
    }

    range(values) {
      const powers = values.map(Math.log10);
      this.low = Math.max(-16, Math.floor(Math.min(...powers))) - 0.4;
      this.high = Math.min(9, Math.ceil(Math.max(...powers))) + 0.4;
    }

    x = (k) => LEFT + ((this.width - LEFT - RIGHT) * k) / this.last;
    y = (value) => {
      const share = (Math.log10(value) - this.low) / (this.high - this.low);
      return TOP + (this.height - TOP - BOTTOM) * (1 - Math.max(0, Math.min(1, share)));
    };

    axes() {
      const nodes = [];
      const every = Math.max(1, Math.ceil((this.high - this.low) / 6));
      for (let power = Math.ceil(this.low / every) * every; power <= this.high; power += every) {
        const y = this.y(10 ** power);
        nodes.push(draw("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y, class: "grid-line" }));
        const name = power === 0 ? "1" : power === 1 ? "10" : `1e${power}`.replace("-", "−");
        nodes.push(draw("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, name));
      }
      const apart = Math.max(1, Math.ceil(this.last / 8));
      for (let k = 0; k <= this.last; k += apart) {
        nodes.push(draw("text", { x: this.x(k), y: this.height - 6, "text-anchor": "middle" }, String(k)));
      }
      return nodes;
    }

    tolerance(tol) {
      const y = this.y(tol);
      return [
        draw("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y, class: "tolerance" }),
        draw("text", { x: LEFT + 4, y: y - 4, class: "tolerance-name" }, "tolerance"),
      ];
    }

    /** Names of the two lines, at the top right, which falling lines leave free. */
    names() {
      const at = { x: this.width - RIGHT - 6, "text-anchor": "end" };
      return [
        draw("text", { ...at, y: TOP + 14, class: "violation-name halo" }, "violation"),
        draw("text", { ...at, y: TOP + 30, class: "damping-name halo" }, "damping λ"),
      ];
    }
  }

  Explorer.Chart = Chart;
})();
