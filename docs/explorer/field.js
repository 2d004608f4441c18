/* The field: many predictions and where they land, as arrows or as a map behind the set.
 *
 * It is computed in slices between frames, coarse first, so that the page never waits for it.
 */
"use strict";
(() => {
  const { draw } = Explorer;
  const SLICE = 10; // milliseconds of work between two frames
  const ARROWS = 17; // to a side
  const PASSES = [22, 110]; // cells to a side of a map
  const STEPS = 40; // where the scale of steps ends

  const hueOf = ([x, y]) => ((Math.atan2(y, x) * 180) / Math.PI + 360) % 360;
  const within = (share) => Math.max(0, Math.min(1, share));

  // nothing is transparent, so that maps suit light and dark pages alike
  const STEPPED = "64 102 176";
  const KEPT = "38 166 134";
  const STRETCHED = "245 130 32";

  const COLOURS = {
    landing: ({ value }) => `hsl(${hueOf(value).toFixed(0)} 62% 72%)`,
    steps: ({ steps }) => `rgb(${STEPPED} / ${(0.85 * within(steps / STEPS)).toFixed(3)})`,
    gradient: ({ share }) => {
      if (share <= 1) return `rgb(${KEPT} / ${(0.7 * share).toFixed(3)})`;
      const more = (100 * within((share - 1) / 2)).toFixed(0);
      return `color-mix(in srgb, rgb(${KEPT} / 0.7), rgb(${STRETCHED} / 0.9) ${more}%)`;
    },
  };

  const LEGENDS = {
    arrows: {
      words: "each line leads from a prediction to its repaired point; its colour is the direction in which that lies",
    },
    landing: {
      bar: `linear-gradient(90deg, ${[0, 60, 120, 180, 240, 300, 360].map((hue) => `hsl(${hue} 62% 72%)`)})`,
      words: "direction from the origin in which it lands: right, up, left, down, right",
    },
    steps: {
      bar: `linear-gradient(90deg, transparent, rgb(${STEPPED} / 0.85))`,
      words: `0 to ${STEPS} steps and more`,
    },
    gradient: {
      bar: `linear-gradient(90deg, transparent, rgb(${KEPT} / 0.7) 40%, rgb(${STRETCHED} / 0.9))`,
      words: "|∂L/∂ŷ| over |∂L/∂y̌|: 0, 1 (green), 3 and more",
    },
  };

  class Field {
    constructor(canvas, legend) {
      this.canvas = canvas;
      this.legend = legend;
      this.job = 0;
    }

    /** Begin anew; `solve(point)` returns {value, steps, status, share} of a prediction. */
    draw(plane, kind, solve) {
      const job = ++this.job;
      const ratio = globalThis.devicePixelRatio || 1;
      Object.assign(this.canvas, { width: plane.width * ratio, height: plane.height * ratio });
      plane.arrows.replaceChildren();
      plane.svg.classList.toggle("over-field", kind in COLOURS);
      this.canvas.dataset.kind = kind;
      this.tell(kind);
      if (kind === "none") return;
      const work = kind === "arrows" ? this.arrows(plane, solve) : this.map(plane, solve, COLOURS[kind], ratio);
      const slice = () => {
        const end = performance.now() + SLICE;
        while (this.job === job && performance.now() < end) {
          if (work.next().done) {
            this.canvas.dataset.done = kind;
            return;
          }
        }
        if (this.job === job) requestAnimationFrame(slice);
      };
      this.canvas.dataset.done = "";
      requestAnimationFrame(slice);
    }

    tell(kind) {
      const { bar, words } = LEGENDS[kind] || {};
      this.legend.hidden = !words;
      if (!words) return;
      const scale = document.createElement("i");
      scale.style.background = bar || "";
      this.legend.replaceChildren(...(bar ? [scale] : []), words);
    }

    * arrows(plane, solve) {
      for (let j = 0; j < ARROWS; j++) {
        for (let i = 0; i < ARROWS; i++) {
          const from = plane.from(((i + 0.5) * plane.width) / ARROWS, ((j + 0.5) * plane.height) / ARROWS);
          const { value, status } = solve(from);
          const colour = status === "converged" ? `hsl(${hueOf(value).toFixed(0)} 65% 50%)` : "gray";
          const [cx, cy] = plane.spot(value).split(",");
          plane.arrows.append(
            draw("path", { d: `M${plane.spot(from)}L${cx},${cy}`, class: "field-arrow", stroke: colour }),
            draw("circle", { cx, cy, r: 2.6, fill: colour }),
          );
          yield;
        }
      }
    }

    * map(plane, solve, colour, ratio) {
      const pen = this.canvas.getContext("2d");
      for (const cells of PASSES) {
        const [width, height] = [plane.width / cells, plane.height / cells];
        for (let j = 0; j < cells; j++) {
          for (let i = 0; i < cells; i++) {
            const found = solve(plane.from((i + 0.5) * width, (j + 0.5) * height));
            pen.fillStyle = found.status === "converged" ? colour(found) : "gray";
            const [left, right] = [i, i + 1].map((k) => Math.round(k * width * ratio));
            const [top, bottom] = [j, j + 1].map((k) => Math.round(k * height * ratio));
            pen.clearRect(left, top, right - left, bottom - top);
            pen.fillRect(left, top, right - left, bottom - top);
            yield;
          }
        }
      }
    }
  }

  Explorer.Field = Field;
})();
