/** A draft tree: node 0 is the root (parent -1), every parent comes before its children. */
export interface DraftTree {
  readonly parents: readonly number[];
  readonly depths: readonly number[];
}

/** Most nodes of one tree, root included; the kernels' limit. */
export const MAX_NODES = 256;

/** What is wrong with a parent array. `node` is the node at fault, `reorderable` whether another order mends it. */
export class TreeError extends Error {
  readonly node: number | null;

  constructor(message: string, node: number | null = null) {
    super(message);
    this.name = "TreeError";
    this.node = node;
  }
}

/** Checks a parent array. Same rules and same words as `DraftTree::new` of canopy-kernels. */
export function makeTree(parents: readonly number[]): DraftTree {
  if (parents.length === 0) throw new TreeError("draft tree: no nodes; the root is a node");
  if (parents.length > MAX_NODES) throw new TreeError(`draft tree: ${parents.length} nodes, at most ${MAX_NODES}`);
  if (parents[0] !== -1) throw new TreeError(`draft tree: node 0 has parent ${parents[0]}; the root's parent is -1`, 0);
  const depths = [0];
  for (let node = 1; node < parents.length; node += 1) {
    const parent = parents[node]!;
    if (parent < 0) {
      throw new TreeError(`draft tree: node ${node} has parent ${parent}; only node 0 is a root (parent -1)`, node);
    }
    if (parent >= node) {
      throw new TreeError(`draft tree: node ${node} has parent ${parent}; a parent must come before its child`, node);
    }
    depths.push(depths[parent]! + 1);
  }
  return { parents: [...parents], depths };
}

/** Depths by parent links alone, for a parent array that is known to be in order. */
export function depthsOf(parents: readonly number[]): number[] {
  const depths: number[] = [];
  for (const parent of parents) depths.push(parent < 0 ? 0 : depths[parent]! + 1);
  return depths;
}

export function maxDepth(tree: DraftTree): number {
  return tree.depths.reduce((most, depth) => Math.max(most, depth), 0);
}

/** Every node's children, in node order. */
export function childrenOf(tree: DraftTree): number[][] {
  const children: number[][] = tree.parents.map(() => []);
  tree.parents.forEach((parent, node) => parent >= 0 && children[parent]!.push(node));
  return children;
}

/** The nodes from the root to `node`, both included. */
export function pathTo(tree: DraftTree, node: number): number[] {
  const path: number[] = [];
  for (let at = node; at >= 0; at = tree.parents[at]!) path.push(at);
  return path.reverse();
}

/** The strict ancestors of every node, from the root down. */
export function ancestorsOf(tree: DraftTree): number[][] {
  const all: number[][] = [];
  tree.parents.forEach((parent) => all.push(parent < 0 ? [] : [...all[parent]!, parent]));
  return all;
}

/** Depth-first pre-order, children in node order. */
export function dfsOrder(tree: DraftTree): number[] {
  const children = childrenOf(tree);
  const order: number[] = [];
  const stack = [0];
  while (stack.length > 0) {
    const node = stack.pop()!;
    order.push(node);
    stack.push(...children[node]!.toReversed());
  }
  return order;
}

/** Level order: by depth, then by node. */
export function levelOrder(tree: DraftTree): number[] {
  return tree.parents.map((_, node) => node).sort((a, b) => tree.depths[a]! - tree.depths[b]! || a - b);
}

/** Renumbers the nodes: `order[position]` is the old node that becomes node `position`. */
export function reorder(tree: DraftTree, order: readonly number[]): { tree: DraftTree; mapping: number[] } {
  const mapping: number[] = [];
  order.forEach((node, position) => (mapping[node] = position));
  const parents = order.map((node) => (tree.parents[node]! < 0 ? -1 : mapping[tree.parents[node]!]!));
  return { tree: makeTree(parents), mapping };
}

/**
 * Offers an order for a parent array that is a tree but not in order: level order, ties by the given number.
 * `mapping[given]` is the new node. Same rules as `DraftTree::from_any_order` of canopy-kernels.
 */
export function fromAnyOrder(parents: readonly number[]): { tree: DraftTree; mapping: number[] } {
  const nodes = parents.length;
  if (nodes === 0 || nodes > MAX_NODES) makeTree(parents);
  try {
    return { tree: makeTree(parents), mapping: parents.map((_, node) => node) };
  } catch {
    // Another order may mend it: go on.
  }
  checkLinks(parents);
  const depths = parents.map((_, node) => climb(parents, node));
  const order = parents.map((_, node) => node).sort((a, b) => depths[a]! - depths[b]! || a - b);
  const mapping: number[] = [];
  order.forEach((node, position) => (mapping[node] = position));
  return { tree: makeTree(order.map((node) => (parents[node]! < 0 ? -1 : mapping[parents[node]!]!))), mapping };
}

function checkLinks(parents: readonly number[]): void {
  const nodes = parents.length;
  let root = -1;
  parents.forEach((parent, node) => {
    if (parent >= nodes || parent < -1) {
      throw new TreeError(`draft tree: node ${node} has parent ${parent}, but there are ${nodes} nodes`, node);
    }
    if (parent !== -1) return;
    if (root >= 0) {
      throw new TreeError(`draft tree: node ${node} has parent -1; only node ${root} is a root (parent -1)`, node);
    }
    root = node;
  });
  if (root < 0) throw new TreeError(`draft tree: none of the ${nodes} nodes is a root (parent -1)`);
}

/** A node's depth by its links, or the error that names a node on the circle. */
function climb(parents: readonly number[], node: number): number {
  let at = node;
  for (let depth = 0; ; depth += 1) {
    if (parents[at]! < 0) return depth;
    at = parents[at]!;
    if (depth + 1 >= parents.length) {
      throw new TreeError(`draft tree: node ${at} is its own ancestor through parent ${parents[at]}`, at);
    }
  }
}
