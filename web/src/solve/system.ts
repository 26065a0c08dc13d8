import { SplitMix64 } from "../tree/shapes.ts";
import { type DraftTree, ancestorsOf } from "../tree/tree.ts";
import type { Step } from "./steps.ts";

/** Keys drawn at random, or all within a few hundredths of one direction with write strengths near 1 and no decay. */
export type KeyKind = "random" | "equal";

const KEY_WIDTH = 64;
const WIDTH = 8;
const SPREAD = 0.02;
const fround = Math.fround;

/** A round's inputs in float32 and the system they make, with the float64 answer of the serial recurrence. */
export interface System {
  tree: DraftTree;
  width: number;
  ancestors: number[][];
  /** One coefficient of G per strict ancestor, from the root down. */
  g: Float32Array[];
  r: Float32Array;
  /** U by the serial recurrence along every root path, in float64. */
  truth: Float64Array;
}

interface Inputs {
  keys: Float32Array;
  values: Float32Array;
  beta: Float32Array;
  gate: Float32Array;
  state: Float32Array;
}

function normal(random: SplitMix64): number {
  return Math.sqrt(-2 * Math.log(random.unit())) * Math.cos(2 * Math.PI * random.unit());
}

function drawInputs(nodes: number, kind: KeyKind, seed: number): Inputs {
  const random = new SplitMix64(seed);
  const direction = Float64Array.from({ length: KEY_WIDTH }, () => normal(random));
  const length = Math.hypot(...direction);
  const keys = new Float32Array(nodes * KEY_WIDTH);
  for (let node = 0; node < nodes; node += 1) {
    const raw = Float64Array.from(direction, (x) => {
      const noise = normal(random);
      return kind === "random" ? noise : x / length + (SPREAD * noise) / Math.sqrt(KEY_WIDTH);
    });
    const scale = 1 / Math.sqrt(raw.reduce((sum, x) => sum + x * x, 1e-6));
    raw.forEach((x, at) => (keys[node * KEY_WIDTH + at] = x * scale));
  }
  const equal = kind === "equal";
  return {
    keys,
    values: Float32Array.from({ length: nodes * WIDTH }, () => normal(random)),
    beta: Float32Array.from({ length: nodes }, () => (equal ? 0.98 + 0.02 * random.unit() : random.unit())),
    gate: Float32Array.from({ length: nodes }, () => (equal ? -1e-3 : -1) * random.unit()),
    state: Float32Array.from({ length: KEY_WIDTH * WIDTH }, () => normal(random) / 8),
  };
}

/** Draws inputs from the seed and forms G and R in float32, as the kernels do. */
export function makeSystem(tree: DraftTree, kind: KeyKind, seed: number): System {
  const nodes = tree.parents.length;
  const inputs = drawInputs(nodes, kind, seed);
  const ancestors = ancestorsOf(tree);
  const total = new Float32Array(nodes);
  tree.parents.forEach((parent, node) => {
    total[node] = inputs.gate[node]! + (parent < 0 ? 0 : total[parent]!);
  });
  const decay = (from: number, to: number) => fround(Math.exp(fround(total[from]! - total[to]!)));
  const g = ancestors.map((all, node) =>
    Float32Array.from(all, (at) => fround(inputs.beta[node]! * decay(node, at)) * dot32(inputs.keys, node, at)),
  );
  return { tree, width: WIDTH, ancestors, g, r: rightSide(inputs, total), truth: serial(tree, inputs) };
}

function dot32(keys: Float32Array, a: number, b: number): number {
  let sum = 0;
  for (let at = 0; at < KEY_WIDTH; at += 1) sum = fround(sum + keys[a * KEY_WIDTH + at]! * keys[b * KEY_WIDTH + at]!);
  return sum;
}

function rightSide(inputs: Inputs, total: Float32Array): Float32Array {
  const r = new Float32Array(total.length * WIDTH);
  for (let node = 0; node < total.length; node += 1) {
    const decay = fround(Math.exp(total[node]!));
    for (let column = 0; column < WIDTH; column += 1) {
      let read = 0;
      for (let at = 0; at < KEY_WIDTH; at += 1) {
        read = fround(read + inputs.state[column * KEY_WIDTH + at]! * inputs.keys[node * KEY_WIDTH + at]!);
      }
      r[node * WIDTH + column] = inputs.beta[node]! * fround(inputs.values[node * WIDTH + column]! - decay * read);
    }
  }
  return r;
}

/** The recurrence node by node, a float64 state per node: another formula than the system, so it can judge it. */
function serial(tree: DraftTree, inputs: Inputs): Float64Array {
  const u = new Float64Array(tree.parents.length * WIDTH);
  const states: Float64Array[] = [];
  tree.parents.forEach((parent, node) => {
    const decay = Math.exp(inputs.gate[node]!);
    const state = Float64Array.from(parent < 0 ? inputs.state : states[parent]!, (x) => x * decay);
    const key = inputs.keys.subarray(node * KEY_WIDTH, (node + 1) * KEY_WIDTH);
    for (let column = 0; column < WIDTH; column += 1) {
      const row = state.subarray(column * KEY_WIDTH, (column + 1) * KEY_WIDTH);
      const read = key.reduce((sum, k, at) => sum + k * row[at]!, 0);
      const write = inputs.beta[node]! * (inputs.values[node * WIDTH + column]! - read);
      key.forEach((k, at) => (row[at]! += write * k));
      u[node * WIDTH + column] = write;
    }
    states.push(state);
  });
  return u;
}

/** A solve under way: `x` starts as R and ends as U. */
export class Run {
  readonly x: Float32Array;
  #term: Float32Array;
  #power: Float32Array[];

  constructor(readonly system: System) {
    this.x = system.r.slice();
    this.#term = system.r.slice();
    this.#power = system.g.map((row) => row.map((g) => -g));
  }

  /** Does one step, every product and sum rounded to float32. */
  advance(step: Step): void {
    const { tree, ancestors, g } = this.system;
    switch (step.kind) {
      case "product":
        for (let node = step.first; node < step.end; node += 1) {
          this.#subtract(node, 0, ancestors[node]!.filter((at) => at < step.first).length);
        }
        return;
      case "substitute":
        for (const node of step.rows) {
          this.#subtract(node, ancestors[node]!.filter((at) => at < step.first).length, ancestors[node]!.length);
        }
        return;
      case "term": {
        const next = new Float32Array(this.x.length);
        tree.depths.forEach((depth, node) => {
          this.#add(next, node, this.#term, g[node]!, step.power - 1, depth, -1);
          this.#each(node, (at) => (this.x[at]! += next[at]!));
        });
        this.#term = next;
        return;
      }
      case "square":
        this.#power = this.#squared();
        return;
      case "apply":
        // From the last node up, so that a row still finds its ancestors as they were.
        for (let node = tree.depths.length - 1; node >= 0; node -= 1) {
          this.#add(this.x, node, this.x, this.#power[node]!, 0, tree.depths[node]! + 1 - step.exponent, 1);
        }
    }
  }

  /** Largest difference to the truth over the rows in `rows`, relative to the largest |U|. */
  error(rows?: readonly boolean[]): number {
    const { truth, width } = this.system;
    let [worst, largest] = [0, 0];
    truth.forEach((value, at) => {
      largest = Math.max(largest, Math.abs(value));
      if (rows && !rows[Math.floor(at / width)]) return;
      const difference = Math.abs(this.x[at]! - value);
      worst = Number.isFinite(difference) ? Math.max(worst, difference) : Infinity;
    });
    return worst / largest;
  }

  #each(node: number, act: (at: number) => void): void {
    const { width } = this.system;
    for (let at = node * width; at < (node + 1) * width; at += 1) act(at);
  }

  #subtract(node: number, from: number, to: number): void {
    this.#add(this.x, node, this.x, this.system.g[node]!, from, to, -1);
  }

  /** `out[node] += sign * sum of factors * rows` over the ancestors at depths `from..to`. */
  #add(out: Float32Array, node: number, rows: Float32Array, factors: Float32Array, from: number, to: number, sign: 1 | -1): void {
    const { ancestors, width } = this.system;
    for (let depth = from; depth < to; depth += 1) {
      const row = ancestors[node]![depth]! * width;
      const factor = sign * factors[depth]!;
      for (let column = 0; column < width; column += 1) {
        const at = node * width + column;
        out[at] = out[at]! + factor * rows[row + column]!;
      }
    }
  }

  #squared(): Float32Array[] {
    const { ancestors } = this.system;
    return this.#power.map((left, node) => {
      const out = new Float32Array(left.length);
      ancestors[node]!.forEach((middle, depth) => {
        const factor = left[depth]!;
        if (factor === 0) return;
        this.#power[middle]!.forEach((x, at) => (out[at] = out[at]! + factor * x));
      });
      return out;
    });
  }
}

/** The whole solve's error. */
export function finalError(system: System, steps: readonly Step[]): number {
  const run = new Run(system);
  for (const step of steps) run.advance(step);
  return run.error();
}
