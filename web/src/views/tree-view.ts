import { h, svg, tableFold, table } from "../dom.ts";
import { visible } from "../live/round-tree.ts";
import type { Store } from "../store.ts";
import { layoutTree } from "../tree/layout.ts";
import { type DraftTree, childrenOf, pathTo } from "../tree/tree.ts";

interface Geometry {
  x: number[];
  y: number[];
  width: number;
  height: number;
  radius: number;
}

const MARGIN = 18;

/** Places in pixels: depth runs down, or to the right where the tree is far deeper than wide. */
export function geometry(tree: DraftTree, room: number, labelled = false): Geometry {
  const { across, along, width, depth } = layoutTree(tree);
  const lying = !labelled && depth > 2 * width && room > 480;
  const fit = (count: number, space: number, least: number, most: number) =>
    Math.min(most, Math.max(least, count > 0 ? space / count : most));
  const stepAcross = fit(Math.max(1, width - 1), (lying ? 320 : room) - 2 * MARGIN, labelled ? 74 : 13, labelled ? 96 : 46);
  const stepAlong = fit(depth, (lying ? room : 450) - 2 * MARGIN, lying ? 19 : labelled ? 32 : 26, 64);
  const radius = Math.max(4.5, Math.min(13, 0.42 * Math.min(stepAcross, stepAlong)));
  const [sizeAcross, sizeAlong] = [(width - 1) * stepAcross + 2 * MARGIN + (labelled ? 56 : 0), depth * stepAlong + 2 * MARGIN];
  const places = across.map((place) => MARGIN + place * stepAcross);
  const steps = along.map((step) => MARGIN + step * stepAlong);
  return lying
    ? { x: steps, y: places, width: sizeAlong, height: sizeAcross, radius }
    : { x: places, y: steps, width: sizeAcross, height: sizeAlong, radius };
}

/** The tree as SVG, its numbers in the circles; pointer and keyboard move the store's node. */
export class TreeView {
  readonly element: HTMLElement;
  readonly #box = h("div", { class: "tree-box" });
  #nodes: SVGGElement[] = [];
  #labels: SVGTextElement[] = [];
  #edges: (SVGPathElement | null)[] = [];

  constructor(private readonly store: Store) {
    const fold = tableFold("Table: nodes, parents, depths", () => this.#table());
    this.element = h("div", {}, this.#box, fold);
    store.onTree(() => {
      fold.open = false;
      this.draw();
    });
    store.onNode(() => this.#light());
    this.#box.addEventListener("keydown", (event) => this.#key(event));
    this.#box.addEventListener("pointerleave", () => this.store.look(null));
  }

  draw(): void {
    const { tree, labels } = this.store.picked;
    const { x, y, width, height, radius } = geometry(tree, this.#box.clientWidth || 600, labels !== undefined);
    const drawing = svg("svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "tree",
      "aria-label": `Draft tree of ${tree.parents.length} nodes; arrow keys move between parent, children and siblings`,
    });
    this.#edges = tree.parents.map((parent, node) => {
      if (parent < 0) return null;
      const bend = x[parent] === x[node] || y[parent] === y[node] ? "" : `${x[parent]} ${(y[parent]! + y[node]!) / 2} ${x[node]} ${(y[parent]! + y[node]!) / 2} `;
      return svg("path", { class: "edge", d: bend ? `M${x[parent]} ${y[parent]}C${bend}${x[node]} ${y[node]}` : `M${x[parent]} ${y[parent]}L${x[node]} ${y[node]}` });
    });
    this.#nodes = tree.parents.map((parent, node) => {
      const what = labels ? `, ${JSON.stringify(labels[node])}` : "";
      const name = parent < 0 ? `Node ${node}, root${what}` : `Node ${node}, parent ${parent}, depth ${tree.depths[node]}${what}`;
      const group = svg("g", { class: "node", role: "treeitem", "aria-level": tree.depths[node]! + 1, "aria-label": name, tabindex: node === 0 ? 0 : -1 });
      group.append(svg("title", {}, name), svg("circle", { cx: x[node], cy: y[node], r: radius }));
      if (radius >= 7) {
        group.append(svg("text", { x: x[node], y: y[node], dy: "0.34em", "font-size": Math.min(12, radius * (node > 99 ? 0.78 : 0.95)) }, String(node)));
      }
      group.addEventListener("pointerenter", () => this.store.look(node));
      group.addEventListener("click", () => this.focus(node));
      group.addEventListener("focus", () => this.store.look(node));
      return group;
    });
    // Beside the nodes, not in them: a node's accessible name says its token already.
    this.#labels = (labels ?? []).map((label, node) =>
      svg("text", { class: "node-label", x: x[node]! + radius + 4, y: y[node], dy: "0.34em" }, shorten(visible(label))));
    drawing.append(svg("g", {}, ...this.#edges), svg("g", { "aria-hidden": "true" }, ...this.#labels), svg("g", {}, ...this.#nodes));
    this.#box.replaceChildren(drawing);
    // A tree that is wider than its box shows the root first.
    this.#box.scrollLeft = x[0]! - this.#box.clientWidth / 2;
    this.#box.scrollTop = y[0]! - this.#box.clientHeight / 2;
  }

  focus(node: number): void {
    for (const [at, group] of this.#nodes.entries()) group.setAttribute("tabindex", at === node ? "0" : "-1");
    this.#nodes[node]?.focus();
  }

  #light(): void {
    const { tree, node } = this.store;
    const path = new Set(node === null ? [] : pathTo(tree, node));
    this.#nodes.forEach((group, at) => {
      group.classList.toggle("on-path", path.has(at));
      group.classList.toggle("looked-at", at === node);
    });
    this.#labels.forEach((label, at) => label.classList.toggle("on-path", path.has(at)));
    this.#edges.forEach((edge, at) => edge?.classList.toggle("on-path", path.has(at)));
  }

  #key(event: KeyboardEvent): void {
    const { tree } = this.store;
    const node = this.#nodes.indexOf(document.activeElement as SVGGElement);
    if (node < 0) return;
    const next = neighbour(tree, node, event.key);
    if (next === null) return;
    event.preventDefault();
    this.focus(next);
  }

  #table(): HTMLTableElement {
    const { tree, labels, probs } = this.store.picked;
    const head = ["Node", "Parent", "Depth", "Root path", ...(labels ? ["Token"] : []), ...(probs ? ["Probability"] : [])];
    const rows = tree.parents.map((parent, node) => [
      node, parent, tree.depths[node]!, pathTo(tree, node).join(" "),
      ...(labels ? [JSON.stringify(labels[node])] : []), ...(probs ? [probs[node]!.toPrecision(3)] : []),
    ]);
    return table(`${this.store.picked.name}: ${tree.parents.length} nodes`, head, rows);
  }
}

function shorten(text: string): string {
  return text.length > 8 ? `${text.slice(0, 7)}…` : text;
}

/** Where an arrow key leads from a node. */
export function neighbour(tree: DraftTree, node: number, key: string): number | null {
  const parent = tree.parents[node]!;
  const children = childrenOf(tree);
  const level = tree.depths.flatMap((depth, at) => (depth === tree.depths[node] ? [at] : []));
  switch (key) {
    case "ArrowUp":
      return parent < 0 ? null : parent;
    case "ArrowDown":
      return children[node]![0] ?? null;
    case "ArrowLeft":
      return level[level.indexOf(node) - 1] ?? null;
    case "ArrowRight":
      return level[level.indexOf(node) + 1] ?? null;
    case "Home":
      return 0;
    case "End":
      return tree.parents.length - 1;
    default:
      return null;
  }
}
