/* Formulas in x and y: a small parser without `eval`, and what the page needs to know of a formula.
 *
 *   sum     = product (("+" | "-") product)*
 *   product = sign (("*" | "/" | nothing) sign)*       2x and 2(x + 1) are products
 *   sign    = ("-" | "+") sign | power
 *   power   = atom (("^" | "**") sign)?                x² and x³ as well
 *   atom    = number | x | y | pi | e | function "(" sum ")" | "(" sum ")"
 *
 * A formula is evaluated on jets [v, x, y, xx, xy, yy]: its value, gradient and Hessian at a point, all exact.
 * `polynomial` finds its coefficients of 1, x, y, x², xy, y² where it has degree two at most: such rows are `Linear` or
 * `Quadratic` sets of the library, all others `Nonlinear`.
 */
"use strict";
(() => {
  class FormulaError extends Error {}

  const CONSTANTS = { pi: Math.PI, e: Math.E };

  // value, first and second derivative of each function of one variable
  const FUNCTIONS = {
    sin: (t) => [Math.sin(t), Math.cos(t), -Math.sin(t)],
    cos: (t) => [Math.cos(t), -Math.sin(t), -Math.cos(t)],
    exp: (t) => [Math.exp(t), Math.exp(t), Math.exp(t)],
    log: (t) => [Math.log(t), 1 / t, -1 / (t * t)],
    sqrt: (t) => [Math.sqrt(t), 0.5 / Math.sqrt(t), -0.25 / (t * Math.sqrt(t))],
    abs: (t) => [Math.abs(t), Math.sign(t), 0],
  };

  const TOKEN = /\s*(?:(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|([a-z]+)|(\*\*|[-+*/^()])|([²³]))/iy;

  function tokens(text) {
    const found = [];
    TOKEN.lastIndex = 0;
    while (text.slice(TOKEN.lastIndex).trim() !== "") {
      const at = TOKEN.lastIndex;
      const match = TOKEN.exec(text);
      if (!match) throw new FormulaError(`“${text.slice(at).trim()[0]}” is not part of a formula`);
      const [, number, name, sign, square] = match;
      if (number !== undefined) found.push({ number: Number(number) });
      else if (name !== undefined) found.push({ name: name.toLowerCase() });
      else if (square !== undefined) found.push({ sign: "^" }, { number: square === "²" ? 2 : 3 });
      else found.push({ sign: sign === "**" ? "^" : sign });
    }
    return found;
  }

  /** The tree of a formula: {op, args} with op a sign, a function, "number", "x" or "y". */
  function parse(text) {
    const list = tokens(text);
    let next = 0;
    const sees = (sign) => next < list.length && list[next].sign === sign;
    const take = (sign) => sees(sign) && Boolean(++next);
    const node = (op, ...args) => ({ op, args });

    function sum() {
      let left = product();
      while (sees("+") || sees("-")) left = node(list[next++].sign, left, product());
      return left;
    }
    function product() {
      let left = signed();
      for (;;) {
        if (sees("*") || sees("/")) left = node(list[next++].sign, left, signed());
        else if (next < list.length && (list[next].sign === undefined || sees("("))) left = node("*", left, power());
        else return left;
      }
    }
    function signed() {
      if (take("-")) return node("negative", signed());
      take("+");
      return power();
    }
    function power() {
      const base = atom();
      return take("^") ? node("^", base, signed()) : base;
    }
    function inside() {
      const tree = sum();
      if (!take(")")) throw new FormulaError("a closing parenthesis is missing");
      return tree;
    }
    function atom() {
      if (next >= list.length) throw new FormulaError("the formula ends too early");
      const { number, name, sign } = list[next++];
      if (number !== undefined) return { op: "number", value: number, args: [] };
      if (sign === "(") return inside();
      if (sign !== undefined) throw new FormulaError(`“${sign}” stands where a number or a variable is expected`);
      if (name === "x" || name === "y") return node(name);
      if (name in CONSTANTS) return { op: "number", value: CONSTANTS[name], args: [] };
      if (!(name in FUNCTIONS)) {
        throw new FormulaError(`“${name}” is unknown: there are x, y, pi, e, ${Object.keys(FUNCTIONS).join(", ")}`);
      }
      if (!take("(")) throw new FormulaError(`${name} needs parentheses: ${name}(…)`);
      return node(name, inside());
    }

    const tree = sum();
    if (next < list.length) throw new FormulaError(`“${list[next].sign}” is one too many`);
    return tree;
  }

  const isConstant = (tree) => tree.op !== "x" && tree.op !== "y" && tree.args.every(isConstant);
  const constantOf = (tree) => jet(tree)(0, 0)[0];

  // jets

  const product = (p, q) => [
    p[0] * q[0],
    p[1] * q[0] + p[0] * q[1],
    p[2] * q[0] + p[0] * q[2],
    p[3] * q[0] + 2 * p[1] * q[1] + p[0] * q[3],
    p[4] * q[0] + p[1] * q[2] + p[2] * q[1] + p[0] * q[4],
    p[5] * q[0] + 2 * p[2] * q[2] + p[0] * q[5],
  ];

  /** f(p) for a function whose value and derivatives at p are given. */
  const chained = (p, [f, df, ddf]) => [
    f,
    df * p[1],
    df * p[2],
    df * p[3] + ddf * p[1] * p[1],
    df * p[4] + ddf * p[1] * p[2],
    df * p[5] + ddf * p[2] * p[2],
  ];

  const added = (p, q, sign) => p.map((entry, i) => entry + sign * q[i]);

  /** t ** n and its derivatives; those of a whole power are finite at 0 as well. */
  function powerOf(t, n) {
    const first = n === 0 ? 0 : n * t ** (n - 1);
    const second = n === 0 || n === 1 ? 0 : n * (n - 1) * t ** (n - 2);
    return [t ** n, first, second];
  }

  /** The function (x, y) → jet of a tree. */
  function jet(tree) {
    const [first, second] = tree.args.map(jet);
    switch (tree.op) {
      case "number": return () => [tree.value, 0, 0, 0, 0, 0];
      case "x": return (x) => [x, 1, 0, 0, 0, 0];
      case "y": return (x, y) => [y, 0, 1, 0, 0, 0];
      case "negative": return (x, y) => first(x, y).map((entry) => -entry);
      case "+": return (x, y) => added(first(x, y), second(x, y), 1);
      case "-": return (x, y) => added(first(x, y), second(x, y), -1);
      case "*": return (x, y) => product(first(x, y), second(x, y));
      case "/": return (x, y) => {
        const q = second(x, y);
        return product(first(x, y), chained(q, [1 / q[0], -1 / q[0] ** 2, 2 / q[0] ** 3]));
      };
      case "^": return isConstant(tree.args[1]) ? constantPower(tree, first) : (x, y) => {
        const base = first(x, y);
        const logarithm = chained(base, FUNCTIONS.log(base[0]));
        const exponent = product(second(x, y), logarithm);
        return chained(exponent, FUNCTIONS.exp(exponent[0]));
      };
      default: return (x, y) => {
        const p = first(x, y);
        return chained(p, FUNCTIONS[tree.op](p[0]));
      };
    }
  }

  function constantPower(tree, first) {
    const n = constantOf(tree.args[1]);
    return (x, y) => {
      const p = first(x, y);
      return chained(p, powerOf(p[0], n));
    };
  }

  // polynomials of degree two at most, [1, x, y, x², xy, y²]; null for anything else

  function timesPolynomial(p, q) {
    const degree = (c) => (c[3] || c[4] || c[5] ? 2 : c[1] || c[2] ? 1 : 0);
    if (degree(p) + degree(q) > 2) return null;
    return [
      p[0] * q[0],
      p[0] * q[1] + p[1] * q[0],
      p[0] * q[2] + p[2] * q[0],
      p[0] * q[3] + p[3] * q[0] + p[1] * q[1],
      p[0] * q[4] + p[4] * q[0] + p[1] * q[2] + p[2] * q[1],
      p[0] * q[5] + p[5] * q[0] + p[2] * q[2],
    ];
  }

  function polynomial(tree) {
    if (isConstant(tree)) return [constantOf(tree), 0, 0, 0, 0, 0];
    if (tree.op === "x") return [0, 1, 0, 0, 0, 0];
    if (tree.op === "y") return [0, 0, 1, 0, 0, 0];
    const [p, q] = tree.args.map(polynomial);
    if (p === null || q === null) return null;
    switch (tree.op) {
      case "negative": return p.map((c) => -c);
      case "+": return added(p, q, 1);
      case "-": return added(p, q, -1);
      case "*": return timesPolynomial(p, q);
      case "/": return isConstant(tree.args[1]) ? p.map((c) => c / q[0]) : null;
      case "^": return isConstant(tree.args[1]) && q[0] === 2 ? timesPolynomial(p, p) : q[0] === 1 ? p : null;
      default: return null;
    }
  }

  // how tightly an operation binds: its own level, and what it asks of its operands
  const BINDS = { "+": [1, 1, 2], "-": [1, 1, 2], "*": [2, 2, 3], "/": [2, 2, 3], negative: [3, 3], "^": [4, 5, 3] };

  /** The formula in Python, of tensors `a` and `b` for x and y; in parentheses if it binds less than `level`. */
  function python(tree, level = 0) {
    if (tree.op === "x" || tree.op === "y") return tree.op === "x" ? "a" : "b";
    if (tree.op === "number") return String(tree.value);
    if (tree.op in FUNCTIONS) {
      return isConstant(tree) ? `(${constantOf(tree)})` : `torch.${tree.op}(${python(tree.args[0])})`;
    }
    const [own, ...asked] = BINDS[tree.op];
    const [first, second] = tree.args.map((arg, i) => python(arg, asked[i]));
    const sign = tree.op === "^" ? "**" : ` ${tree.op} `;
    const code = tree.op === "negative" ? `-${first}` : first + sign + second;
    return own < level ? `(${code})` : code;
  }

  Explorer.formula = { FormulaError, parse, isConstant, constantOf, jet, polynomial, python };
})();
