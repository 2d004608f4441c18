/* Guided examples: a state, and what to see in it. */
"use strict";
Explorer.presets = [
  {
    id: "start", name: "Start here",
    story:
      "The set is where two disks overlap, and ŷ lies outside. Each dot is a step of the repair: short while " +
      "the damping is large, Newton's at the end; the chart shows both. Drag ŷ anywhere. The red arrows are " +
      "downhill directions of the loss: at y̌ towards ★, and at ŷ what the repair sends back to the network. " +
      "Dashed at ŷ: what would arrive without a repair.",
    state: { set: "lens", hat: [-2.1, 2.2], target: [1.5, 1.9] },
  },
  {
    id: "stuck", name: "Why a projection has no gradient along active rows",
    story:
      "The answer is a corner of the triangle. Two rows are active there, and whichever way ŷ moves a little, " +
      "y̌ stays: the gradient that arrives at ŷ is zero, although the loss pulls towards ★. Drag ŷ up until x + " +
      "y <= 1 alone is active: the part of the gradient along the edge comes back, the part along the row's " +
      "normal does not. In training, a pull on y̌ − ŷ in the loss, layer.proximity, keeps such outputs " +
      "learning.",
    state: { set: "triangle", hat: [1.35, -0.45], target: [0.25, 0.5], start: "nearest", show: ["nearest"], half: 1.6 },
  },
  {
    id: "small", name: "Damping too small on a curve",
    story:
      "Near the centre the row x² + y² is almost flat. A step with damping 0.0001 believes the linear model, " +
      "jumps over the whole ring and comes back to its outer edge: y̌ is twice as far away as the nearest point. " +
      "Slide λ up to 1, or choose “annealed”: the path calms down and ends near the inner edge. So close to the " +
      "centre a small move of ŷ swings y̌ around, hence the long arrow at ŷ.",
    state: {
      set: "ring", hat: [0.08, 0.04], target: [3.4, 1.3], half: 6.4, show: ["nearest"],
      damping: "constant", constant: 1e-4,
    },
  },
  {
    id: "pieces", name: "Two pieces: where do points land?",
    story:
      "Ring and slab together leave two pieces, above and below. The colour of a place says where a prediction " +
      "there lands. The map jumps where colours do: two predictions, close together, come to different pieces. " +
      "Drag ŷ across the border, or choose another set with two pieces, the slice of a torus.",
    state: { set: "slab", hat: [2.2, 0.35], target: [0.2, -1.6], field: "landing", show: ["nearest"] },
  },
  {
    id: "hardnet", name: "HardNet keeps satisfied rows where they are",
    story:
      "One of the two half-planes is violated. HardNet moves that row to its bound and keeps the value of the " +
      "other, so it slides far away from the nearest point. With all rows in a step, which is what “auto” means " +
      "for independent linear rows, the repair holds the satisfied row as well, the more the smaller the " +
      "damping; with rows “active” it goes the short way.",
    state: { set: "wedge", hat: [2.1, 0.9], target: [-1.8, -1.2], show: ["nearest", "hardnet"] },
  },
  {
    id: "dc3", name: "DC3 completes, then corrects",
    story:
      "On the segment x + y = 1 DC3 predicts y alone and lets x follow, so it never leaves the line, and the x " +
      "of ŷ gets no gradient at all. Rows x >= 0 and y >= 0 are approached by gradient steps. Then choose the " +
      "sine curve: with no linear equality to complete, gradient steps alone have to find it.",
    state: { set: "segment", hat: [2.1, 0.6], target: [-0.6, 1.9], show: ["nearest", "dc3"] },
  },
  {
    id: "curve", name: "A curve as a set",
    story:
      "y = sin(2x) is an equality: the set has no inside, and y̌ can move along the curve alone. Where the " +
      "repair gathers predictions, little of the gradient arrives (no colour); where it spreads them apart, " +
      "more than there was (orange).",
    state: { set: "sine", hat: [1.5, 1.4], target: [2.4, -0.3], field: "gradient", show: ["nearest"] },
  },
];
