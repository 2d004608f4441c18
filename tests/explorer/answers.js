/* Reads a list of {rows, points, options} from the standard input; writes what the page's scripts answer for every point. */
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const page = path.join(__dirname, "../../docs/explorer");
for (const name of ["dual", "formula", "sets", "repair", "contour", "nearest", "rivals"]) {
  const file = path.join(page, `${name}.js`);
  vm.runInThisContext(fs.readFileSync(file, "utf8"), file);
}

function projection(set, point) {
  const found = Explorer.nearest(set, point);
  return found && { value: found.map(({ v }) => v), jacobian: Explorer.jacobianOf(found) };
}

const METHODS = {
  repair: Explorer.repair,
  nearest: projection,
  hardnet: Explorer.rivals.hardnet,
  dc3: Explorer.rivals.dc3,
};

const cases = JSON.parse(fs.readFileSync(0, "utf8"));
const answers = cases.map(({ method, rows, points, options }) => {
  const set = Explorer.sets.read(rows);
  return points.map((point) => METHODS[method](set, point, options));
});
process.stdout.write(JSON.stringify(answers));
