import { type DraftTree, ancestorsOf, maxDepth } from "../tree/tree.ts";

/** The ways to solve `(I + G) U = R` that the page steps through. */
export type Method = { kind: "blocked"; tile: number } | { kind: "neumann" } | { kind: "squaring" };

export const METHODS: readonly { id: string; name: string; method: Method }[] = [
  { id: "blocked64", name: "Blocked 64", method: { kind: "blocked", tile: 64 } },
  { id: "blocked32", name: "Blocked 32", method: { kind: "blocked", tile: 32 } },
  { id: "blocked16", name: "Blocked 16", method: { kind: "blocked", tile: 16 } },
  { id: "neumann", name: "Neumann series", method: { kind: "neumann" } },
  { id: "squaring", name: "Squaring", method: { kind: "squaring" } },
];

/**
 * One sequential step: everything in it can run at once, and it needs the steps before it.
 * `product`: rows `[first, end)` less their solved ancestors above `first`. `substitute`: `rows` less their ancestors
 * from `first` on. `term`: the series' next power of G. `apply`: times `(I + (-G)^exponent)`. `square`: the next power.
 */
export type Step =
  | { kind: "product"; first: number; end: number; work: number }
  | { kind: "substitute"; first: number; end: number; rows: number[]; work: number }
  | { kind: "term"; power: number; work: number }
  | { kind: "apply"; exponent: number; work: number }
  | { kind: "square"; exponent: number; work: number };

/** The steps of a method on a tree. `work` counts multiply-adds per column of the right side; squares count once. */
export function stepsOf(tree: DraftTree, method: Method): Step[] {
  if (method.kind === "blocked") return blockedSteps(tree, method.tile);
  const depth = maxDepth(tree);
  const reach = (distance: number) => tree.depths.reduce((sum, d) => sum + Math.max(0, d + 1 - distance), 0);
  const steps: Step[] = [];
  if (method.kind === "neumann") {
    for (let power = 1; power <= depth; power += 1) steps.push({ kind: "term", power, work: triangle(tree, power) });
    return steps;
  }
  for (let exponent = 1; exponent <= depth; exponent *= 2) {
    if (exponent > 1) steps.push({ kind: "square", exponent, work: squareWork(tree, exponent / 2) });
    steps.push({ kind: "apply", exponent, work: reach(exponent) });
  }
  return steps;
}

/** Coefficients of G that meet a term which is zero above depth `power - 1`. */
function triangle(tree: DraftTree, power: number): number {
  return tree.depths.reduce((sum, depth) => sum + Math.max(0, depth - power + 1), 0);
}

/** Multiply-adds of the product of `G^exponent` with itself. */
function squareWork(tree: DraftTree, exponent: number): number {
  return tree.depths.reduce((sum, depth) => {
    const free = depth - 2 * exponent + 1;
    return sum + (free > 0 ? (free * (free + 1)) / 2 : 0);
  }, 0);
}

function blockedSteps(tree: DraftTree, tile: number): Step[] {
  const ancestors = ancestorsOf(tree);
  const nodes = tree.parents.length;
  const steps: Step[] = [];
  for (let first = 0; first < nodes; first += tile) {
    const end = Math.min(first + tile, nodes);
    const inside = (node: number) => ancestors[node]!.filter((at) => at >= first).length;
    const rows = Array.from({ length: end - first }, (_, i) => first + i);
    const work = rows.reduce((sum, node) => sum + ancestors[node]!.length - inside(node), 0);
    if (work > 0) steps.push({ kind: "product", first, end, work });
    const levels = new Map<number, number[]>();
    for (const node of rows) levels.set(inside(node), [...(levels.get(inside(node)) ?? []), node]);
    for (let level = 1; levels.has(level); level += 1) {
      const at = levels.get(level)!;
      steps.push({ kind: "substitute", first, end, rows: at, work: at.length * level });
    }
  }
  return steps;
}

/** The nodes whose U is final after the first `done` steps. A series' row is final once the power passes its depth. */
export function finalAfter(tree: DraftTree, method: Method, steps: readonly Step[], done: number): boolean[] {
  const nodes = tree.parents.length;
  if (method.kind === "blocked") {
    const last = new Array<number>(nodes).fill(0);
    steps.forEach((step, at) => {
      if (step.kind === "product") for (let node = step.first; node < step.end; node += 1) last[node] = at + 1;
      if (step.kind === "substitute") for (const node of step.rows) last[node] = at + 1;
    });
    return last.map((at) => at <= done);
  }
  let covered = 0;
  for (const step of steps.slice(0, done)) {
    if (step.kind === "term") covered = step.power;
    if (step.kind === "apply") covered = 2 * step.exponent - 1;
  }
  return tree.depths.map((depth) => depth <= covered);
}

/** What a step does, in words. */
export function describe(step: Step): string {
  switch (step.kind) {
    case "product":
      return `Rows ${step.first} to ${step.end - 1}: subtract the solved ancestors above the tile, one product`;
    case "substitute":
      return step.rows.length === 1
        ? `Row ${step.rows[0]}: subtract its ancestors inside the tile`
        : `${step.rows.length} rows (${list(step.rows)}): subtract their ancestors inside the tile`;
    case "term":
      return `Term ${step.power}: multiply the last term by −G, add it to every row of depth ${step.power} or more`;
    case "apply":
      return step.exponent === 1 ? "Multiply by (I − G)" : `Multiply by (I + G^${step.exponent})`;
    case "square":
      return `Square: G^${step.exponent} = G^${step.exponent / 2} · G^${step.exponent / 2}`;
  }
}

function list(rows: readonly number[]): string {
  return rows.length <= 6 ? rows.join(", ") : `${rows.slice(0, 5).join(", ")}, … ${rows[rows.length - 1]}`;
}
