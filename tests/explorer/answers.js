/* Reads a list of cases {method, set or rows, points, options} from the standard input; writes the page's answers. */
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

function answer({ method, set, rows, points, options }) {
  const text = rows === undefined ? Explorer.sets.CATALOGUE.find(({ id }) => id === set).text : rows;
  if (method !== "read") {
    const known = Explorer.sets.read(text);
    return points.map((point) => METHODS[method](known, point, options));
  }
  try {
    Explorer.sets.read(text);
    return { error: "" };
  } catch (error) {
    return { error: error.message };
  }
}

process.stdout.write(JSON.stringify(JSON.parse(fs.readFileSync(0, "utf8")).map(answer)));
