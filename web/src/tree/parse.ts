import { type DraftTree, TreeError, fromAnyOrder, makeTree } from "./tree.ts";

/** What became of a pasted parent array. */
export type Parsed =
  | { kind: "tree"; tree: DraftTree }
  | { kind: "reorder"; message: string; node: number | null; tree: DraftTree; mapping: number[] }
  | { kind: "error"; message: string; node: number | null };

/** Reads a parent array: integers with commas, spaces or line breaks between them, brackets allowed. */
export function parseParents(text: string): Parsed {
  const words = text.replace(/[[\](){}]/g, " ").split(/[\s,;]+/).filter((word) => word !== "");
  const parents: number[] = [];
  for (const [node, word] of words.entries()) {
    if (!/^[+-]?\d{1,9}$/.test(word)) {
      return { kind: "error", node, message: `draft tree: node ${node} has parent "${word.slice(0, 20)}"; expected an integer` };
    }
    parents.push(Number(word));
  }
  try {
    return { kind: "tree", tree: makeTree(parents) };
  } catch (error) {
    return offer(parents, error as TreeError);
  }
}

function offer(parents: number[], first: TreeError): Parsed {
  try {
    const { tree, mapping } = fromAnyOrder(parents);
    return { kind: "reorder", message: first.message, node: first.node, tree, mapping };
  } catch (error) {
    const { message, node } = error as TreeError;
    return { kind: "error", message, node };
  }
}
