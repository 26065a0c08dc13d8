import { type DraftTree, childrenOf, maxDepth } from "./tree.ts";

/** A node's place: `across` in leaf widths, `along` in depths. */
export interface Layout {
  across: number[];
  along: number[];
  width: number;
  depth: number;
}

/**
 * Leaves take places side by side in depth-first order; a parent stands over the middle of its children, or over its
 * first child with `straight`.
 */
export function layoutTree(tree: DraftTree, straight = false): Layout {
  const children = childrenOf(tree);
  const across = tree.parents.map(() => 0);
  let leaves = 0;
  // Nodes in depth-first order, each followed by itself once its children are placed: no recursion on deep chains.
  const stack: [number, boolean][] = [[0, false]];
  while (stack.length > 0) {
    const [node, placed] = stack.pop()!;
    const own = children[node]!;
    if (own.length === 0) {
      across[node] = leaves;
      leaves += 1;
    } else if (placed) {
      const [first, last] = [across[own[0]!]!, across[own[own.length - 1]!]!];
      across[node] = straight ? first : (first + last) / 2;
    } else {
      stack.push([node, true], ...own.toReversed().map((child): [number, boolean] => [child, false]));
    }
  }
  return { across, along: [...tree.depths], width: leaves, depth: maxDepth(tree) };
}
