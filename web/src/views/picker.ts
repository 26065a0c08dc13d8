import { byId, h } from "../dom.ts";
import type { Order, Picked, Store } from "../store.ts";
import { parseParents } from "../tree/parse.ts";
import * as shapes from "../tree/shapes.ts";
import { type DraftTree, depthsOf, maxDepth } from "../tree/tree.ts";

interface Field {
  name: string;
  value: number;
  min: number;
  max: number;
  choices?: readonly number[];
}

interface Family {
  id: string;
  label: string;
  about: string;
  fields: readonly Field[];
  make(values: readonly number[]): DraftTree;
}

const field = (name: string, value: number, min: number, max: number): Field => ({ name, value, min, max });
const choice = (name: string, value: number, choices: readonly number[]): Field => ({ name, value, choices, min: choices[0]!, max: choices[choices.length - 1]! });
const SEED = field("Seed", 1, 0, 999_999_999);

/** The named shapes of the kernels' tests and benches. */
export const FAMILIES: readonly Family[] = [
  { id: "chain", label: "Chain", about: "Plain decoding, or one drafted block.", fields: [field("Nodes", 16, 1, 256)], make: ([n]) => shapes.chain(n!) },
  { id: "balanced", label: "Balanced top-k", about: "Every node has k children, down to a depth.", fields: [field("k", 2, 1, 255), field("Depth", 5, 0, 255)], make: ([k, d]) => shapes.balanced(k!, d!) },
  { id: "skewed", label: "Skewed", about: "A spine; the siblings of its nodes end at once.", fields: [field("k", 3, 1, 255), field("Depth", 9, 0, 255)], make: ([k, d]) => shapes.skewed(k!, d!) },
  { id: "random", label: "Random", about: "Every parent uniform among the nodes before.", fields: [field("Nodes", 48, 1, 256), SEED], make: ([n, s]) => shapes.random(n!, s!) },
  { id: "bole", label: "Bole’s", about: "Top-4 down to depth 8, pruned to the likeliest (arXiv 2608.01651).", fields: [field("Nodes", 64, 8, 256), SEED], make: ([n, s]) => shapes.bole(n!, s!) },
  { id: "specla", label: "SpecLA’s", about: "A likeliest chain down to its depth, then the likeliest rest (arXiv 2607.16673).", fields: [choice("k", 4, [2, 4]), choice("Depth", 12, [4, 12, 24]), choice("Nodes", 32, [16, 32]), SEED], make: ([k, d, n, s]) => shapes.specla(k!, d!, n!, s!) },
];

/** A draft tree that the embedded model made, recorded from the server. */
export interface RecordedTree {
  name: string;
  parents: number[];
  labels: string[];
  probs: number[];
}

/** Chooses the store's tree. */
export class Picker {
  readonly #families = byId<HTMLSelectElement>("family");
  readonly #fields = byId("family-fields");
  readonly #about = byId("family-about");
  readonly #problem = byId("tree-problem");
  readonly #facts = byId("tree-facts");
  #recorded: readonly RecordedTree[] = [];

  constructor(private readonly store: Store) {
    this.#families.replaceChildren(
      ...FAMILIES.map(({ id, label }) => h("option", { value: id }, label)),
      h("option", { value: "recorded" }, "Draft tree of the embedded model"),
      h("option", { value: "pasted" }, "Your own parent array"),
    );
    this.#families.addEventListener("change", () => this.choose(this.#families.value));
    store.onTree(() => this.#tell());
  }

  /** Fills in the recorded trees once they are loaded. */
  setRecorded(trees: readonly RecordedTree[]): void {
    this.#recorded = trees;
    if (this.#families.value === "recorded") this.choose("recorded");
  }

  /** Shows a family's fields and picks its tree. */
  choose(id: string): void {
    this.#families.value = id;
    this.#fail("");
    if (id === "pasted") return this.#showPaste();
    if (id === "recorded") return this.#showRecorded();
    const family = FAMILIES.find((one) => one.id === id)!;
    this.#about.textContent = family.about;
    const inputs = family.fields.map((one) => this.#input(id, one));
    const pick = () => this.#pickFamily(family, inputs.map((input) => Number(input.value)));
    for (const input of inputs) input.addEventListener("input", pick);
    this.#fields.replaceChildren(...inputs.map((input, at) => h("label", { class: "number" }, family.fields[at]!.name, input)));
    pick();
  }

  /** Picks a chain. */
  chain(nodes: number): void {
    this.choose("chain");
    const input = byId<HTMLInputElement>("chain-nodes");
    input.value = String(nodes);
    input.dispatchEvent(new Event("input"));
  }

  /** Takes a tree from elsewhere on the page. */
  show(picked: Picked): void {
    this.#families.value = "recorded";
    this.#about.textContent = picked.name;
    this.#fields.replaceChildren();
    this.#fail("");
    this.store.pick(picked);
  }

  #input(id: string, { name, value, min, max, choices }: Field): HTMLInputElement | HTMLSelectElement {
    const key = `${id}-${name.toLowerCase()}`;
    if (choices) return h("select", { id: key }, ...choices.map((one) => h("option", { value: one, selected: one === value }, String(one))));
    return h("input", { id: key, type: "number", min, max, value, required: true, inputmode: "numeric" });
  }

  #pickFamily(family: Family, values: number[]): void {
    const bad = family.fields.findIndex(({ min, max }, at) => !Number.isInteger(values[at]) || values[at]! < min || values[at]! > max);
    if (bad >= 0) {
      const { name, min, max } = family.fields[bad]!;
      return this.#fail(`${name}: expected a whole number from ${min} to ${max}`);
    }
    try {
      const tree = family.make(values);
      this.#fail("");
      this.store.pick({ tree, name: `${family.label}, ${family.fields.map(({ name }, at) => `${name} ${values[at]}`).join(", ")}` });
    } catch (error) {
      this.#fail((error as Error).message);
    }
  }

  #showRecorded(): void {
    this.#about.textContent = this.#recorded.length > 0 ? "Rounds that the embedded pair drafted and verified; tokens stand beside the nodes." : "The recorded rounds are not loaded.";
    const select = h("select", { id: "recorded-round" }, ...this.#recorded.map(({ name }, at) => h("option", { value: at }, name)));
    const pick = () => {
      const chosen = this.#recorded[Number(select.value)];
      if (chosen) this.store.pick({ ...chosen, tree: { parents: chosen.parents, depths: depthsOf(chosen.parents) } });
    };
    select.addEventListener("change", pick);
    this.#fields.replaceChildren(h("label", { class: "wide" }, "Round", select));
    pick();
  }

  #showPaste(): void {
    this.#about.textContent = "One parent per node, −1 for the root, up to 256 nodes; commas, spaces or lines between them.";
    const area = h("textarea", { id: "parents", rows: 4, spellcheck: "false", "aria-describedby": "tree-problem" });
    area.value = this.store.tree.parents.join(", ");
    area.addEventListener("input", () => this.#paste(area));
    this.#fields.replaceChildren(h("label", { class: "wide" }, "Parent array", area));
    this.#paste(area);
  }

  #paste(area: HTMLTextAreaElement): void {
    const parsed = parseParents(area.value);
    area.setAttribute("aria-invalid", String(parsed.kind !== "tree"));
    if (parsed.kind === "tree") {
      this.#fail("");
      this.store.pick({ tree: parsed.tree, name: "Your parent array" });
      return;
    }
    if (parsed.kind === "error") return this.#fail(parsed.message);
    const mend = h("button", { type: "button", id: "mend" }, "Put parents first");
    mend.addEventListener("click", () => {
      area.value = parsed.tree.parents.join(", ");
      this.#paste(area);
      this.#fail(`Renumbered: ${renumbering(parsed.mapping)}`, null, "note");
      area.focus();
    });
    this.#fail(parsed.message, mend);
  }

  #fail(message: string, offer: HTMLElement | null = null, kind = "problem"): void {
    this.#problem.hidden = message === "";
    this.#problem.className = kind;
    this.#problem.replaceChildren(message, ...(offer ? [" ", offer] : []));
  }

  #tell(): void {
    const { tree } = this.store;
    const inner = new Set(tree.parents);
    const leaves = tree.parents.filter((_, node) => !inner.has(node)).length;
    const facts: [string, number][] = [["nodes", tree.parents.length], ["depth", maxDepth(tree)], ["leaves", leaves]];
    this.#facts.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
  }
}

function renumbering(mapping: readonly number[]): string {
  const moved = mapping.flatMap((to, from) => (to === from ? [] : [`${from} → ${to}`]));
  return moved.length > 10 ? `${moved.slice(0, 10).join(", ")} and ${moved.length - 10} more` : moved.join(", ");
}

/** The choices of the numbering switch. */
export const ORDERS: readonly (readonly [Order, string])[] = [["dfs", "DFS"], ["level", "level"], ["given", "as given"]];
