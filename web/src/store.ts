import { type DraftTree, dfsOrder, levelOrder, makeTree, reorder } from "./tree/tree.ts";

/** How the picked tree's nodes are numbered. */
export type Order = "given" | "dfs" | "level";

/** A picked tree with what is known of its nodes. */
export interface Picked {
  tree: DraftTree;
  /** Where it comes from, in words. */
  name: string;
  /** A text per node: its token. */
  labels?: readonly string[];
  /** The drafter's probability per node. */
  probs?: readonly number[];
}

type Listener = () => void;

/** The page's one selection: a tree, its numbering, and the node that is looked at. */
export class Store {
  #given: Picked = { tree: makeTree([-1]), name: "" };
  #order: Order = "dfs";
  #shown: Picked = this.#given;
  #node: number | null = null;
  #tree: Listener[] = [];
  #focus: Listener[] = [];

  /** The tree as it is numbered now. */
  get picked(): Picked {
    return this.#shown;
  }

  get tree(): DraftTree {
    return this.#shown.tree;
  }

  get order(): Order {
    return this.#order;
  }

  /** The node under the pointer or the keyboard's focus. */
  get node(): number | null {
    return this.#node;
  }

  onTree(listener: Listener): void {
    this.#tree.push(listener);
  }

  onNode(listener: Listener): void {
    this.#focus.push(listener);
  }

  pick(picked: Picked, order: Order = this.#order): void {
    this.#given = picked;
    this.#order = order;
    this.#renumber();
  }

  setOrder(order: Order): void {
    this.#order = order;
    this.#renumber();
  }

  look(node: number | null): void {
    if (node === this.#node) return;
    this.#node = node;
    for (const listener of this.#focus) listener();
  }

  #renumber(): void {
    this.#shown = renumbered(this.#given, this.#order);
    this.#node = null;
    for (const listener of this.#tree) listener();
    for (const listener of this.#focus) listener();
  }
}

/** The picked tree in another numbering; labels and probabilities move along. */
export function renumbered(picked: Picked, order: Order): Picked {
  if (order === "given") return picked;
  const nodes = order === "dfs" ? dfsOrder(picked.tree) : levelOrder(picked.tree);
  const moved: Picked = { name: picked.name, tree: reorder(picked.tree, nodes).tree };
  if (picked.labels) moved.labels = nodes.map((node) => picked.labels![node]!);
  if (picked.probs) moved.probs = nodes.map((node) => picked.probs![node]!);
  return moved;
}
