/* The plane: set, iterates, answers, arrows and the two handles, as vector graphics. */
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const CELLS = 120; // of the contours that are drawn
  const NUDGE = 0.05; // an arrow key; with shift a tenth of it
  const ARROW = { square: 0.5, distance: 0.8, linear: 0.5 }; // drawn length of a gradient of length 1

  /** An element of a drawing. */
  function draw(name, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // markers, each drawn around the origin
  const MARKS = {
    repair: { name: "repair", colour: "var(--check)", d: "M-7,0A7,7 0 1 1 7,0A7,7 0 1 1 -7,0Z" },
    nearest: { name: "nearest", colour: "var(--nearest)", d: "M0,-8L8,0L0,8L-8,0Z" },
    hardnet: { name: "HardNet", colour: "var(--hardnet)", d: "M-6,-6H6V6H-6Z" },
    dc3: { name: "DC3", colour: "var(--dc3)", d: "M0,-8L7.5,6H-7.5Z" },
  };
  const STAR = Array.from({ length: 10 }, (_, i) => {
    const [radius, angle] = [i % 2 ? 5 : 12, (Math.PI / 5) * i - Math.PI / 2];
    return `${(radius * Math.cos(angle)).toFixed(2)},${(radius * Math.sin(angle)).toFixed(2)}`;
  }).join(" ");

  class Plane {
    /** `moved(handle, [x, y])` is called while a handle, "hat" or "target", is dragged. */
    constructor(svg, moved) {
      this.svg = svg;
      this.moved = moved;
      this.grid = draw("g");
      this.region = draw("g");
      this.arrows = draw("g");
      this.marks = draw("g");
      this.handles = { target: this.handle("target"), hat: this.handle("hat") };
      this.definitions = draw("defs");
      const layers = [this.definitions, this.grid, this.region, this.arrows, this.marks];
      svg.append(...layers, this.handles.target, this.handles.hat);
      this.listen();
    }

    handle(kind) {
      const [what, shape] = kind === "hat"
        ? ["prediction ŷ", draw("circle", { r: 8, class: "hat" })]
        : ["target of the loss", draw("polygon", { points: STAR, class: "star" })];
      const label = `${what}: move it by the arrow keys`;
      const attributes = { class: "handle", id: `handle-${kind}`, tabindex: 0, role: "slider", "aria-label": label };
      return draw("g", attributes, draw("circle", { r: 22, class: "grip" }), shape);
    }

    /** Sizes from the page; true if they changed. */
    measure(half) {
      const { clientWidth: width, clientHeight: height } = this.svg.parentElement;
      const changed = width !== this.width || height !== this.height || half !== this.half;
      Object.assign(this, { width, height, half, scale: Math.min(width, height) / (2 * half) });
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      return changed;
    }

    at = ([x, y]) => [this.width / 2 + x * this.scale, this.height / 2 - y * this.scale];
    from = (px, py) => [(px - this.width / 2) / this.scale, (this.height / 2 - py) / this.scale];
    spot = (p) => this.at(p).map((entry) => Math.max(-1e5, Math.min(1e5, entry)).toFixed(2)).join(",");

    listen() {
      const place = ({ clientX, clientY }) => {
        const { left, top } = this.svg.getBoundingClientRect();
        return this.from(clientX - left, clientY - top);
      };
      let dragged = null;
      this.svg.addEventListener("pointerdown", (event) => {
        const grabbed = event.target.closest(".handle");
        if (!grabbed && event.pointerType !== "mouse") return; // a finger beside the handles scrolls the page, or taps
        dragged = grabbed === this.handles.target ? "target" : "hat";
        this.svg.setPointerCapture(event.pointerId);
        this.handles[dragged].focus({ preventScroll: true });
        event.preventDefault();
        if (!grabbed) this.moved(dragged, place(event));
      });
      this.svg.addEventListener("pointermove", (event) => dragged && this.moved(dragged, place(event)));
      for (const end of ["pointerup", "pointercancel"]) this.svg.addEventListener(end, () => { dragged = null; });
      // inside a drawing `touch-action` is not heard: this keeps a finger on a handle from scrolling the page
      const hold = (event) => event.target.closest(".handle") && event.preventDefault();
      this.svg.addEventListener("touchstart", hold, { passive: false });
      this.svg.addEventListener("click", (event) => {
        if (event.pointerType === "touch" && !event.target.closest(".handle")) this.moved("hat", place(event));
      });
      for (const [kind, handle] of Object.entries(this.handles)) {
        handle.addEventListener("keydown", (event) => this.nudge(kind, event));
      }
    }

    nudge(kind, event) {
      const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!way) return;
      event.preventDefault();
      const far = event.shiftKey ? NUDGE / 10 : NUDGE;
      const [x, y] = this.places[kind];
      this.places = { ...this.places, [kind]: [x + far * way[0], y + far * way[1]] }; // for the next key of this frame
      this.moved(kind, this.places[kind]);
    }

    /** What changes with the set, the zoom and the size: grid, regions and bounds. */
    drawSet(set) {
      const [right, top] = [this.width / 2 / this.scale, this.height / 2 / this.scale];
      this.grid.replaceChildren(...this.lines(right, top));
      const reach = Math.max(right, top) * 1.04;
      const sides = Explorer.contours(set, reach, CELLS).map((side) => ({ ...side, d: this.rings(side.rings) }));
      const regions = sides.filter(({ row }) => !set.rows[row].equality);
      this.definitions.replaceChildren(...regions.map(({ d }, i) =>
        draw("clipPath", { id: `clip${i}` }, draw("path", { d, "clip-rule": "evenodd" }))));
      const clipped = (node, but) => regions.reduce(
        (inner, side, i) => (side === but ? inner : draw("g", { "clip-path": `url(#clip${i})` }, inner)), node);
      const thin = set.rows.some(({ equality }) => equality); // then the set is a curve, and no other bound its edge
      const body = draw("rect", { x: 0, y: 0, width: this.width, height: this.height, class: "inside" });
      this.bounds = sides.map(({ row, d }) => ({ row, node: draw("path", { d, class: "bound" }) }));
      const edges = sides
        .filter(({ row }) => !thin || set.rows[row].equality)
        .map((side) => clipped(draw("path", { d: side.d, class: "edge" }), side));
      this.region.replaceChildren(...(thin ? [] : [clipped(body)]), ...this.bounds.map(({ node }) => node), ...edges);
    }

    lines(right, top) {
      const every = this.half > 5 ? 2 : this.half > 1 ? 1 : 0.5;
      const nodes = [];
      for (let v = every * Math.ceil(-Math.max(right, top) / every); v <= Math.max(right, top); v += every) {
        const [px, py] = this.at([v, v]);
        const kind = v === 0 ? "axis-line" : "grid-line";
        nodes.push(draw("line", { x1: px, x2: px, y1: 0, y2: this.height, class: kind }));
        nodes.push(draw("line", { x1: 0, x2: this.width, y1: py, y2: py, class: kind }));
        const name = String(v).replace("-", "−");
        if (v !== 0) {
          nodes.push(draw("text", { x: px, y: this.height - 6, "text-anchor": "middle", class: "halo" }, name));
          if (py < this.height - 24) nodes.push(draw("text", { x: 6, y: py + 4, class: "halo" }, name));
        }
      }
      return nodes;
    }

    rings = (rings) => rings.map((ring) => `M${ring.map(this.spot).join("L")}Z`).join("");

    /** Everything that moves with ŷ. */
    drawScene(scene) {
      const { state, result, answers, loss, pulled, shown } = scene;
      this.places = { hat: state.hat, target: state.target };
      for (const [kind, node] of Object.entries(this.handles)) {
        node.setAttribute("transform", `translate(${this.spot(this.places[kind])})`);
        node.setAttribute("aria-valuetext", `x ${this.places[kind][0]}, y ${this.places[kind][1]}`);
        node.setAttribute("aria-valuenow", this.places[kind][0]);
      }
      const { used } = result.path[shown];
      for (const { row, node } of this.bounds) node.classList.toggle("used", used[row]);
      const others = Object.keys(answers).filter((method) => state.show.includes(method) && answers[method].value);
      const scale = ARROW[state.loss];
      this.marks.replaceChildren(
        ...others.map((method) =>
          this.line(state.hat, answers[method].value, { class: "reach", style: `stroke: ${MARKS[method].colour}` })),
        ...this.path(state, result, shown),
        ...others.map((method) => this.mark(method, answers[method].value)),
        this.mark("repair", result.value),
        ...this.descent(state.hat, loss.gradient, scale, "ghost"),
        ...this.descent(result.value, loss.gradient, scale),
        ...this.descent(state.hat, pulled, scale),
        this.label("y̌", result.value, state.hat, "var(--check)"),
        this.label("ŷ", state.hat, result.value, "var(--hat)"),
        this.label("t", state.target, result.value, "var(--target)"),
      );
    }

    path({ start, hat }, { path }, shown) {
      const points = path.map(({ point }) => point);
      const nodes = [];
      if (start === "nearest") nodes.push(this.line(hat, points[0], { class: "jump" }));
      nodes.push(draw("polyline", { points: points.map(this.spot).join(" "), class: "path" }));
      points.forEach((point, k) => {
        const [cx, cy] = this.spot(point).split(",");
        if (k === shown) nodes.push(draw("circle", { cx, cy, r: 6, class: "iterate shown" }));
        else if (k > 0) nodes.push(draw("circle", { cx, cy, r: 3.6, class: "iterate" }));
      });
      return nodes;
    }

    line = (from, to, attributes) => draw("path", { d: `M${this.spot(from)}L${this.spot(to)}`, ...attributes });

    mark(method, value) {
      const { d, colour } = MARKS[method];
      const transform = `translate(${this.spot(value)})`;
      return draw("path", { d, transform, class: "answer", style: `fill: ${colour}`, "data-method": method });
    }

    /** A name beside a point, on the side away from another one. */
    label(text, value, away, colour) {
      const [[px, py], [qx, qy]] = [this.at(value), this.at(away)];
      const far = Math.hypot(px - qx, py - qy);
      const aside = colour.includes("hat") ? [-1, 0] : [1, 0]; // where both are one
      const [ux, uy] = far > 1 ? [(px - qx) / far, (py - qy) / far] : aside;
      const [x, y] = [px + 20 * ux, py + 5 + 20 * uy];
      const within = (entry, most) => Math.max(14, Math.min(most - 14, entry));
      const place = { x: within(x, this.width), y: within(y, this.height), "text-anchor": "middle" };
      return draw("text", { ...place, class: "name halo", style: `fill: ${colour}` }, text);
    }

    /** An arrow against a gradient, from a point; none where it would be shorter than a pixel. */
    descent(from, gradient, scale, extra = "") {
      const [ax, ay] = this.at(from);
      const [dx, dy] = [-gradient[0] * scale * this.scale, gradient[1] * scale * this.scale];
      const length = Math.hypot(dx, dy);
      if (!(length > 1.5)) return [];
      const cut = Math.min(1, (1.5 * Math.max(this.width, this.height)) / length);
      const [ux, uy] = [dx / length, dy / length];
      const [bx, by] = [ax + dx * cut, ay + dy * cut];
      const head = Math.min(11, length * 0.6);
      const beside = (back, side) => [bx - head * (back * ux + side * uy), by - head * (back * uy - side * ux)];
      return [
        draw("path", { d: `M${ax},${ay}L${beside(0.7, 0)}`, class: `descent ${extra}` }),
        draw("path", { d: `M${bx},${by}L${beside(1, 0.45)}L${beside(1, -0.45)}Z`, class: `descent-head ${extra}` }),
      ];
    }
  }

  Object.assign(Explorer, { Plane, draw, MARKS });
})();
