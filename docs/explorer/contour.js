/* Curves g(x, y) = b and regions g ≤ b, as polygons: marching squares, vertices then moved onto the curve by Newton.
 *
 * Each row has its own polygons; the set is the intersection of its rows' regions, which the page draws by clipping, so
 * that corners are exact.
 */
"use strict";
(() => {
  const REFINE = 3; // Newton steps of a vertex

  /** Values of a function on a grid of (cells + 1)² points over [-half, half]², framed by a value outside. */
  function sample(g, half, cells) {
    const width = (2 * half) / cells;
    const grid = [];
    for (let j = 0; j <= cells; j++) {
      for (let i = 0; i <= cells; i++) grid.push(g(i * width - half, j * width - half));
    }
    return { grid, half, cells, width };
  }

  /** Closed rings [[x, y], …] around {g ≤ level}, or around {g ≥ level} if not `below`; the frame counts as outside. */
  function rings({ grid, half, cells, width }, level, below, refine) {
    const size = cells + 1;
    const height = (i, j) => {
      if (i < 0 || j < 0 || i > cells || j > cells) return 1;
      const value = (grid[j * size + i] - level) * (below ? 1 : -1);
      return Number.isFinite(value) ? value : 1;
    };
    const links = new Map(); // from the edge where a segment begins to the one where it ends
    const vertices = new Map();
    const vertex = (i, j, k, l) => {
      const [p, q] = [height(i, j), height(k, l)];
      const share = Math.min(1, Math.max(0, p / (p - q)));
      const key = `${i},${j},${k},${l}`;
      vertices.set(key, [(i + share * (k - i)) * width - half, (j + share * (l - j)) * width - half]);
      return key;
    };
    for (let j = -1; j <= cells; j++) {
      for (let i = -1; i <= cells; i++) cell(i, j, height, vertex, links);
    }
    return chains(links).map((ring) => ring.map((key) => refine(vertices.get(key))));
  }

  /** The segments of one cell, with the inside on their left; keys of edges run to the right or upwards. */
  function cell(i, j, height, vertex, links) {
    const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]];
    const inside = corners.map(([k, l]) => height(k, l) <= 0);
    const edge = (s) => {
      const [a, b] = [corners[s], corners[(s + 1) % 4]];
      return s < 2 ? vertex(...a, ...b) : vertex(...b, ...a);
    };
    // walking around the cell, each edge that leaves the inside is joined to the next one before it that enters
    for (let s = 0; s < 4; s++) {
      if (!inside[s] || inside[(s + 1) % 4]) continue;
      let enters = (s + 3) % 4;
      while (!(!inside[enters] && inside[(enters + 1) % 4])) enters = (enters + 3) % 4;
      links.set(edge(s), edge(enters));
    }
  }

  function chains(links) {
    const found = [];
    while (links.size) {
      const ring = [];
      let [key] = links.keys();
      while (links.has(key)) {
        ring.push(key);
        const next = links.get(key);
        links.delete(key);
        key = next;
      }
      found.push(ring);
    }
    return found;
  }

  /** Moves a point onto row = level along the gradient; one that is carried farther than a cell stays. */
  const onto = (row, level, width) => (start) => {
    let [x, y] = start;
    for (let k = 0; k < REFINE; k++) {
      const [v, gx, gy] = row.at(x, y);
      const share = (v - level) / (gx * gx + gy * gy);
      [x, y] = [x - share * gx, y - share * gy];
    }
    return Math.hypot(x - start[0], y - start[1]) < width ? [x, y] : start;
  };

  /** [{row, bound, below, rings}] of every finite bound of a set; `row` is its index. */
  function contours(set, half, cells) {
    return set.rows.flatMap((row, index) => {
      const field = sample((x, y) => row.at(x, y)[0], half, cells);
      const sides = row.equality ? [[row.upper, true]] : [[row.lower, false], [row.upper, true]];
      return sides
        .filter(([bound]) => Number.isFinite(bound))
        .map(([bound, below]) => ({
          row: index, bound, below, rings: rings(field, bound, below, onto(row, bound, field.width)),
        }));
    });
  }

  Explorer.contours = contours;
})();
