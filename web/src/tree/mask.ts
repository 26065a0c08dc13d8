import { type DraftTree, pathTo } from "./tree.ts";

/** Runs of cells in one row of the ancestor mask: columns `[from, to)`. */
export type Span = readonly [from: number, to: number];

/** A node's row: its root path as runs, itself excluded. */
export function maskRow(tree: DraftTree, node: number): Span[] {
  const spans: [number, number][] = [];
  for (const at of pathTo(tree, node).slice(0, -1)) {
    const last = spans[spans.length - 1];
    if (last && last[1] === at) last[1] = at + 1;
    else spans.push([at, at + 1]);
  }
  return spans;
}

/** Whether `other` is `node` or one of its ancestors. */
export function sees(tree: DraftTree, node: number, other: number): boolean {
  for (let at = node; at >= other && at >= 0; at = tree.parents[at]!) if (at === other) return true;
  return false;
}

/** Set cells of the mask, the diagonal included: the sum of all depths plus a cell a node. */
export function maskCells(tree: DraftTree): number {
  return tree.depths.reduce((sum, depth) => sum + depth + 1, 0);
}

/** An SVG path of unit cells for the given rows. */
export function cellPath(rows: Iterable<readonly [row: number, spans: readonly Span[]]>): string {
  let path = "";
  for (const [row, spans] of rows) for (const [from, to] of spans) path += `M${from} ${row}H${to}V${row + 1}H${from}Z`;
  return path;
}
