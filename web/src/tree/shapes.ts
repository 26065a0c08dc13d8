import { type DraftTree, MAX_NODES, TreeError, makeTree } from "./tree.ts";

/** The shapes of `canopy_kernels::DraftTree`: the same arguments and seed give the same tree in both languages. */

const MASK = (1n << 64n) - 1n;

/** Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. */
export class SplitMix64 {
  #state: bigint;

  constructor(seed: bigint | number) {
    this.#state = BigInt(seed) & MASK;
  }

  next(): bigint {
    this.#state = (this.#state + 0x9e37_79b9_7f4a_7c15n) & MASK;
    let z = this.#state;
    z = ((z ^ (z >> 30n)) * 0xbf58_476d_1ce4_e5b9n) & MASK;
    z = ((z ^ (z >> 27n)) * 0x94d0_49bb_1331_11ebn) & MASK;
    return z ^ (z >> 31n);
  }

  /** Uniform in `0..bound`. */
  below(bound: number): number {
    return Number((this.next() * BigInt(bound)) >> 64n);
  }

  /** Uniform in (0, 1). */
  unit(): number {
    return (Number(this.next() >> 11n) + 0.5) / 2 ** 53;
  }
}

function refuse(op: string, arg: string, expected: string, got: number): never {
  throw new TreeError(`${op}: ${arg}, expected: ${expected}, got: ${got}`);
}

function checkSize(nodes: number): void {
  if (nodes > MAX_NODES) throw new TreeError(`draft tree: ${nodes} nodes, at most ${MAX_NODES}`);
}

export function chain(nodes: number): DraftTree {
  checkSize(nodes);
  return makeTree(Array.from({ length: nodes }, (_, node) => node - 1));
}

/** Every node down to `depth - 1` has `k` children; level order. */
export function balanced(k: number, depth: number): DraftTree {
  if (k === 0) refuse("balanced tree", "k", "at least 1", k);
  const parents = [-1];
  let [first, end] = [0, 1];
  for (let level = 0; level < depth; level += 1) {
    const nodes = (end - first) * k + end;
    checkSize(nodes);
    for (let node = first; node < end; node += 1) for (let i = 0; i < k; i += 1) parents.push(node);
    [first, end] = [end, nodes];
  }
  return makeTree(parents);
}

/** A spine down to `depth` whose every node has `k` children, of which only the first goes on. */
export function skewed(k: number, depth: number): DraftTree {
  if (k === 0) refuse("skewed tree", "k", "at least 1", k);
  checkSize(k * depth + 1);
  const parents = [-1];
  for (let level = 0; level < depth; level += 1) {
    const spine = level === 0 ? 0 : (level - 1) * k + 1;
    for (let i = 0; i < k; i += 1) parents.push(spine);
  }
  return makeTree(parents);
}

/** Every parent uniform among the nodes before its child. */
export function random(nodes: number, seed: bigint | number): DraftTree {
  checkSize(nodes);
  const generator = new SplitMix64(seed);
  return makeTree(Array.from({ length: nodes }, (_, node) => (node === 0 ? -1 : generator.below(node))));
}

/** Of the kind that Bole (arXiv 2608.01651) measures: top-4 down to depth 8, pruned to the `nodes` likeliest. */
export function bole(nodes: number, seed: bigint | number): DraftTree {
  if (nodes < 8 || nodes > MAX_NODES) refuse("bole tree", "nodes", "8 to 256", nodes);
  return bestFirst([-1], { nodes, k: 4, depth: 8 }, seed);
}

/** Of the kind that SpecLA (arXiv 2607.16673) measures: a likeliest chain down to `depth`, then the likeliest rest. */
export function specla(k: number, depth: number, nodes: number, seed: bigint | number): DraftTree {
  const op = "specla tree";
  if (k !== 2 && k !== 4) refuse(op, "k", "2 or 4", k);
  if (![4, 12, 24].includes(depth)) refuse(op, "depth", "4, 12 or 24", depth);
  if (nodes !== 16 && nodes !== 32) refuse(op, "nodes", "16 or 32", nodes);
  if (k === 2 && depth === 4 && nodes === 32) {
    refuse(op, "nodes", "16 for top-2 to depth 4, which ends at 31", nodes);
  }
  const spine = Math.min(depth, nodes - 1);
  return bestFirst(Array.from({ length: spine + 1 }, (_, node) => node - 1), { nodes, k, depth }, seed);
}

interface Candidate {
  parent: number;
  depth: number;
  logProb: number;
}

/** Grows a tree, given its spine, by the likeliest open candidate until it has `limits.nodes` nodes. */
function bestFirst(parents: number[], limits: { nodes: number; k: number; depth: number }, seed: bigint | number): DraftTree {
  const generator = new SplitMix64(seed);
  const open: Candidate[] = [];
  const expand = (parent: number, depth: number, logProb: number, from: number): number => {
    const keep = 0.4 + 0.5 * generator.unit();
    let rest = 1;
    for (let rank = 0; rank < limits.k; rank += 1) {
      const share = rest * keep;
      rest -= share;
      if (rank >= from && depth < limits.depth) {
        open.push({ parent, depth: depth + 1, logProb: logProb + Math.log(share) });
      }
    }
    return logProb + Math.log(keep);
  };
  let logProb = 0;
  const spine = parents.length;
  for (let node = 0; node < spine; node += 1) logProb = expand(node, node, logProb, node + 1 < spine ? 1 : 0);
  while (parents.length < limits.nodes && open.length > 0) {
    let best = 0;
    open.forEach((candidate, at) => candidate.logProb > open[best]!.logProb && (best = at));
    const [taken] = open.splice(best, 1);
    parents.push(taken!.parent);
    expand(parents.length - 1, taken!.depth, taken!.logProb, 0);
  }
  return makeTree(parents);
}
