import { h, perFrame, svg, table, tableFold } from "../dom.ts";
import type { Store } from "../store.ts";
import { cellPath, maskCells, maskRow, sees } from "../tree/mask.ts";
import { pathTo } from "../tree/tree.ts";

/** The T x T grid of who sees whom; a row's cells are the node's root path. */
export class MaskView {
  readonly element: HTMLElement;
  readonly #box: HTMLElement;
  readonly #note = h("p", { class: "readout", "aria-live": "polite" });
  #row: SVGPathElement | null = null;
  #path: SVGPathElement | null = null;
  #cross: SVGPathElement | null = null;

  constructor(private readonly store: Store) {
    this.#box = h("div", { class: "mask-box", tabindex: 0, role: "application", "aria-label": "Ancestor mask: up and down arrows move through the rows" });
    const fold = tableFold("Table: rows of the mask", () => this.#table());
    this.element = h("div", {}, this.#box, this.#note, fold);
    store.onTree(() => {
      fold.open = false;
      this.draw();
    });
    store.onNode(() => this.#light());
    this.#box.addEventListener("pointermove", perFrame((event: PointerEvent) => this.#point(event)));
    this.#box.addEventListener("pointerleave", () => store.look(null));
    this.#box.addEventListener("keydown", (event) => this.#key(event));
  }

  draw(): void {
    const { tree } = this.store;
    const nodes = tree.parents.length;
    const all = tree.parents.map((_, node) => [node, maskRow(tree, node)] as const);
    const drawing = svg("svg", { viewBox: `-0.25 -0.25 ${nodes + 0.5} ${nodes + 0.5}`, class: "mask", "aria-hidden": "true" });
    this.#row = svg("path", { class: "mask-row" });
    this.#cross = svg("path", { class: "mask-cross" });
    this.#path = svg("path", { class: "mask-lit" });
    drawing.append(
      svg("rect", { class: "mask-ground", width: nodes, height: nodes }),
      this.#row,
      this.#cross,
      svg("path", { class: "mask-cells", d: cellPath(all) }),
      svg("path", { class: "mask-diagonal", d: cellPath(all.map(([node]) => [node, [[node, node + 1]]] as const)) }),
      this.#path,
    );
    if (nodes <= 48) drawing.append(svg("path", { class: "mask-lines", d: lines(nodes) }));
    this.#box.replaceChildren(drawing);
    this.#light();
  }

  #light(): void {
    const { tree, node } = this.store;
    const nodes = tree.parents.length;
    const rest = `${maskCells(tree).toLocaleString("en")} of ${(nodes * nodes).toLocaleString("en")} cells set; point at a node or use the arrow keys`;
    if (node === null) {
      for (const path of [this.#row, this.#path, this.#cross]) path?.setAttribute("d", "");
      this.#note.textContent = rest;
      return;
    }
    const path = pathTo(tree, node);
    this.#row?.setAttribute("d", cellPath([[node, [[0, nodes]]]]));
    this.#cross?.setAttribute("d", cellPath(path.slice(0, -1).map((at) => [at, [[at, at + 1]]] as const)));
    this.#path?.setAttribute("d", cellPath([[node, [...maskRow(tree, node), [node, node + 1]]]]));
    const shown = path.length > 12 ? [...path.slice(0, 5), "…", ...path.slice(-6)] : path;
    this.#note.textContent = `Node ${node}, depth ${tree.depths[node]}: sees ${shown.join(" → ")}`;
  }

  #point(event: PointerEvent): void {
    const drawing = this.#box.querySelector("svg");
    if (!drawing) return;
    const { top, height } = drawing.getBoundingClientRect();
    const nodes = this.store.tree.parents.length;
    const node = Math.floor(((event.clientY - top) / height) * (nodes + 0.5) - 0.25);
    this.store.look(node >= 0 && node < nodes ? node : null);
  }

  #key(event: KeyboardEvent): void {
    const last = this.store.tree.parents.length - 1;
    const at = this.store.node;
    const moves: Record<string, number> = {
      ArrowDown: at === null ? 0 : Math.min(at + 1, last), ArrowUp: Math.max((at ?? 1) - 1, 0), Home: 0, End: last,
    };
    const next = moves[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.store.look(next);
  }

  #table(): HTMLTableElement {
    const { tree } = this.store;
    const all = tree.parents.map((_, node) => node);
    const rows = all.map((node) => [node, all.map((other) => (sees(tree, node, other) ? "1" : "·")).join("")]);
    return table("Row i has a 1 for every node on the path from the root to i", ["Node", "Mask"], rows);
  }
}

function lines(nodes: number): string {
  let path = "";
  for (let at = 0; at <= nodes; at += 1) path += `M${at} 0V${nodes}M0 ${at}H${nodes}`;
  return path;
}
