import { barChart } from "../chart/bars.ts";
import { bytes } from "../chart/scale.ts";
import { byId, h, segments, table, tableFold } from "../dom.ts";
import { QWEN35_9B, scratch } from "../memory.ts";
import type { OtherRow } from "../results.ts";
import type { Store } from "../store.ts";

const BATCHES = [["1", "1"], ["4", "4"], ["16", "16"]] as const;

/** Scratch memory of the picked tree: a state per node against a pseudo-value per node. */
export class MemoryView {
  #batch = 1;
  #rows: readonly OtherRow[] = [];

  constructor(private readonly store: Store) {
    byId("memory-controls").append(segments({ legend: "Batch", name: "memory-batch", value: "1", choices: BATCHES }, (value) => {
      this.#batch = Number(value);
      this.draw();
    }));
    store.onTree(() => this.draw());
  }

  setRows(rows: readonly OtherRow[]): void {
    this.#rows = rows.filter((row) => /scratch|memory/.test(row.case) && typeof row.megabytes === "number");
    this.draw();
  }

  draw(): void {
    const dims = QWEN35_9B;
    const nodes = this.store.tree.parents.length;
    const { snapshots, pseudoValues } = scratch(dims, nodes, this.#batch);
    const group = `${nodes} nodes, batch ${this.#batch}`;
    const bars = [
      { group, name: "a state per node", value: snapshots, text: bytes(snapshots), tone: "t-serial" },
      { group, name: "pseudo-values", value: pseudoValues, text: bytes(pseudoValues), tone: "t-canopy" },
    ];
    const label = `Scratch memory of one ${dims.name} layer for the picked tree: ${bytes(snapshots)} of snapshots against ${bytes(pseudoValues)} of pseudo-values`;
    const measured = this.#rows.map((row) => h("p", { class: "quiet" }, `${row.variant}: ${row.megabytes!.toLocaleString("en")} MB a layer measured at batch ${row.batch}, ${row.nodes} nodes, on ${row.device} (${row.line}).`));
    byId("memory-chart").replaceChildren(
      barChart(bars, { label, kind: "linear", unit: `bytes a layer; ${dims.layers} such layers`, format: bytes }),
      h("p", {}, `${(snapshots / pseudoValues).toFixed(0)} times less: every node keeps d_v + 1 numbers a head, not d_k × d_v.`),
      ...measured,
      tableFold("Table: memory", () => table(label, ["What", "Formula", "A layer", `All ${dims.layers} layers`], [
        ["A state per node", "4 · B · T · Hv · Dk · Dv", bytes(snapshots), bytes(snapshots * dims.layers)],
        ["Pseudo-values and gates", "4 · B · T · Hv · (Dv + 1)", bytes(pseudoValues), bytes(pseudoValues * dims.layers)],
      ])),
    );
  }
}
