import { barChart } from "../chart/bars.ts";
import { heatMap } from "../chart/heat.ts";
import { type Series, lineChart } from "../chart/lines.ts";
import { short } from "../chart/scale.ts";
import { byId, h, segments, table, tableFold } from "../dom.ts";
import type { CrossoverCell, E2eRow, KernelRow, OtherRow, Results } from "../results.ts";

const WHO = { canopy: "canopy", peer: "peer’s code, measured by this project", paper: "as published" } as const;

/** What a chart without rows says. */
export function nothing(what: string): HTMLElement {
  return h("p", { class: "no-data" }, `No data yet: bench/results has no row of ${what}.`);
}

function provenance(row: { who: keyof typeof WHO; source?: string; note?: string; l2?: string; line: string }): string {
  return [WHO[row.who], row.source, row.l2 && `L2 ${row.l2}`, row.note, row.line].filter(Boolean).join("; ");
}

/** What a kernel's latency is drawn against, and how its rows are told apart besides the variant. */
const along = (row: KernelRow) => (/attention/.test(row.case) ? row.context : row.nodes);
const group = (row: KernelRow) => (/attention/.test(row.case) ? `${row.heads ?? "?"} heads × ${row.head_dim ?? "?"}, ${row.nodes ?? "?"} nodes` : row.shape);
const KERNELS: Record<string, string> = {
  "tree_gdn.verify": "GDN verify", "tree_gdn_serial.verify": "GDN verify", "tree_gdn.commit": "GDN commit", "tree_attention.verify": "tree attention",
};
const kernelName = (row: KernelRow) => KERNELS[row.case] ?? row.case;

/** Latency of one layer's kernels: against nodes, or for attention against the context; one batch size and one shape at a time. */
export class LatencyView {
  readonly #rows: KernelRow[];
  #kernel = "";
  #batch = 1;
  #shape = "";

  constructor(rows: readonly KernelRow[]) {
    this.#rows = rows.filter((row) => along(row) !== undefined);
    const names = distinct(this.#rows.map(kernelName));
    this.#choose(names.includes("GDN verify") ? "GDN verify" : (names[0] ?? ""));
  }

  #choose(kernel: string): void {
    this.#kernel = kernel;
    const own = this.#rows.filter((row) => kernelName(row) === kernel);
    const batches = distinct(own.map((row) => row.batch ?? 1)).sort((a, b) => a - b);
    const shapes = distinct(own.map(group));
    this.#batch = batches[0] ?? 1;
    this.#shape = shapes.includes("bole") ? "bole" : (shapes[0] ?? "");
    const draw = () => this.#draw();
    const controls = h("div", { class: "controls" }, select("latency-kernel", "Kernel", distinct(this.#rows.map(kernelName)), kernel, (value) => this.#choose(value)));
    if (shapes.length > 0) controls.append(select("latency-shape", "Tree", shapes, this.#shape, (value) => ((this.#shape = value), draw())));
    if (batches.length > 1) {
      const choices = batches.map((one) => [String(one), String(one)] as const);
      controls.append(segments({ legend: "Batch", name: "latency-batch", value: String(this.#batch), choices }, (value) => ((this.#batch = Number(value)), draw())));
    }
    byId("latency-controls").replaceChildren(controls);
    draw();
  }

  #draw(): void {
    const rows = this.#rows.filter((row) => kernelName(row) === this.#kernel && (row.batch ?? 1) === this.#batch && group(row) === this.#shape);
    const ours = rows.some(({ who }) => who === "canopy") ? [] : [h("p", { class: "no-data" }, "No row of canopy’s own kernels for this choice yet: what is drawn is other implementations’.")];
    const against = /attention/.test(rows[0]?.case ?? "") ? "tokens of context" : "nodes of the tree";
    const label = `Latency of ${this.#kernel} against ${against}, batch ${this.#batch}, ${this.#shape}`;
    // a logarithmic axis has no place for attention without context: those rows are in the table alone
    const placed = rows.filter((row) => along(row)! > 0);
    const chart = placed.length > 0 ? lineChart(series(placed), { x: against, y: "µs per layer", label }) : nothing("this kernel, tree and batch");
    const fold = tableFold("Table: latency", () => latencyTable(label, against, rows));
    byId("latency-chart").replaceChildren(...(rows.length > 0 ? ours : []), chart, fold);
  }
}

function select(id: string, label: string, values: readonly string[], value: string, chosen: (value: string) => void): HTMLLabelElement {
  const element = h("select", { id }, ...values.map((one) => h("option", { value: one, selected: one === value }, one)));
  element.addEventListener("change", () => chosen(element.value));
  return h("label", { class: "number" }, label, element);
}

function series(rows: readonly KernelRow[]): Series[] {
  const rank = { canopy: 0, peer: 1, paper: 2 };
  const nameOf = (row: KernelRow) => {
    const marks = row.who === "canopy" ? [row.dtype, row.l2 && `L2 ${row.l2}`].filter(Boolean).join(", ") : "";
    return `${row.variant}${marks ? ` (${marks})` : ""} · ${row.device}`;
  };
  const names = distinct([...rows].sort((a, b) => rank[a.who] - rank[b.who]).map(nameOf));
  return names.map((name) => {
    const own = rows.filter((row) => nameOf(row) === name);
    const points = own.map((row) => ({
      x: along(row)!, y: row.us, ...(row.p10 ? { low: row.p10 } : {}), ...(row.p90 ? { high: row.p90 } : {}),
      title: `${name}: ${along(row)}, ${short(row.us)} µs (${provenance(row)})`,
    }));
    return { name, who: own[0]!.who, points };
  });
}

function latencyTable(caption: string, against: string, rows: readonly KernelRow[]): HTMLTableElement {
  const sorted = [...rows].sort((a, b) => a.variant.localeCompare(b.variant) || along(a)! - along(b)!);
  return table(caption, ["Variant", "Hardware", against, "µs", "From"], sorted.map((row) => [row.variant, row.device, along(row)!, short(row.us), provenance(row)]));
}

/** Figures of other people, with their hardware. */
export function drawPublished(rows: readonly KernelRow[], other: readonly OtherRow[]): void {
  const bole = rows.filter(({ who, case: name }) => who === "paper" && name === "tree_gdn.verify");
  const bars = bole.map((row) => ({
    group: `${row.device}, batch ${row.batch}`, name: row.variant, value: row.us, text: `${short(row.us)} µs`, tone: /serial/.test(row.variant) ? "t-serial" : "t-peer",
  }));
  const label = "Published latency per layer, serial against one solve, with its hardware";
  const speedups = other.filter(({ case: name }) => name === "speedup").map((row) => `${row.variant}: ${row.low}–${row.high}× on ${row.device}, ${row.nodes} nodes (${row.source}).`);
  const notes = other.filter(({ case: name }) => name === "note").map((row) => `${row.variant}: “${row.text}” (${row.source}).`);
  byId("published-chart").replaceChildren(
    bars.length > 0 ? barChart(bars, { label, kind: "log", unit: "µs per layer (log scale); tree size not stated in the paper", format: short }) : nothing("paper.tree_gdn.verify"),
    ...[...speedups, ...notes].map((text) => h("p", { class: "quiet" }, text)),
    tableFold("Table: published figures", () => table(label, ["Figure", "Hardware", "Batch", "µs", "From"], bole.map((row) => [row.variant, row.device, row.batch ?? "", short(row.us), provenance(row)]))),
  );
}

/** Where one solve stops winning. */
export function drawCrossover(cells: readonly CrossoverCell[]): void {
  const place = byId("crossover-chart");
  if (cells.length === 0) return place.replaceChildren(nothing("the serial and the one-solve kernel on the same tree of known depth and width"));
  const keys = distinct(cells.map(({ device, batch }) => `${device}, batch ${batch}`));
  const select = h("select", { id: "crossover-choice" }, ...keys.map((key) => h("option", {}, key)));
  const box = h("div");
  const draw = () => {
    const own = cells.filter(({ device, batch }) => `${device}, batch ${batch}` === select.value);
    const label = `Serial time over one-solve time by depth and width, ${select.value}`;
    box.replaceChildren(
      heatMap(own, label),
      tableFold("Table: crossover", () => table(label, ["Depth", "Width", "Serial µs", "One solve µs", "Ratio", "From"], own.map((cell) => [cell.depth, cell.width, short(cell.serial), short(cell.solve), `${(cell.serial / cell.solve).toFixed(2)}×`, cell.line]))),
    );
  };
  select.addEventListener("change", draw);
  place.replaceChildren(h("label", { class: "number" }, "Machine", select), box);
  draw();
}

/** Errors of peers' kernels on nearly equal keys, and of canopy's where rows exist. */
export function drawAccuracy(other: readonly OtherRow[]): void {
  const rows = other.filter((row) => /accuracy/.test(row.case) && typeof row.relative_error === "number");
  const label = "Relative error on nearly equal keys, chain of 32 nodes";
  const text = (error: number) => error.toExponential(0).replace("e-", "e−").replace("e+", "e");
  const bars = rows.map((row) => ({ group: row.device, name: row.variant ?? row.case, value: row.relative_error!, text: text(row.relative_error!), tone: row.who === "canopy" ? "t-canopy" : "t-peer" }));
  byId("accuracy-chart").replaceChildren(
    bars.length > 0 ? barChart(bars, { label, kind: "log", unit: "relative error of the output (log scale)", format: text }) : nothing("tree_gdn.accuracy"),
    tableFold("Table: accuracy", () => table(label, ["Implementation", "Hardware", "Relative error", "From"], rows.map((row) => [row.variant ?? row.case, row.device, text(row.relative_error!), provenance(row)]))),
  );
}

/** Tokens a second by mode. */
export function drawRates(rows: readonly E2eRow[]): void {
  const place = byId("rates-chart");
  if (rows.length === 0) return place.replaceChildren(nothing("e2e.generate"));
  const keyOf = (row: E2eRow) => `${row.model ?? "model not recorded"}${row.batch ? `, batch ${row.batch}` : ""}`;
  const keys = distinct(rows.map(keyOf));
  const select = h("select", { id: "rates-choice" }, ...keys.map((key) => h("option", {}, key)));
  const box = h("div");
  const draw = () => {
    const own = rows.filter((row) => keyOf(row) === select.value);
    const label = `Tokens a second, ${select.value}`;
    const bars = own.map((row) => ({
      group: `${row.prompts ?? "prompts not recorded"}${row.context ? `, context ${row.context}` : ""}`, name: shortMode(row), value: row.rate,
      ...(row.p10 ? { low: row.p10 } : {}), ...(row.p90 ? { high: row.p90 } : {}),
      text: `${short(row.rate)}${row.ratio && row.mode !== "ar" ? ` (${row.ratio.toFixed(2)}×)` : ""}`, tone: row.who === "canopy" ? (row.mode === "ar" ? "t-serial" : "t-canopy") : "t-peer",
    }));
    const devices = distinct(own.map(({ device }) => device)).join("; ");
    box.replaceChildren(
      barChart(bars, { label, kind: "linear", unit: "tokens/s; whiskers from the 10th to the 90th percentile", format: short }),
      h("p", { class: "quiet" }, `Measured on: ${devices}.`),
      tableFold("Table: tokens a second", () => table(label, ["Prompts", "Mode", "Tokens/s", "Against ar", "Acceptance length", "Machine", "From"], own.map((row) => [row.prompts ?? "", row.mode, short(row.rate), row.ratio ? `${row.ratio.toFixed(2)}×` : "", row.acceptance?.toFixed(2) ?? "", row.device, row.line]))),
    );
  };
  select.addEventListener("change", draw);
  place.replaceChildren(...(keys.length > 1 ? [h("label", { class: "number" }, "Model", select)] : []), box);
  draw();
}

function shortMode(row: E2eRow): string {
  const name = row.mode.replace(/^transformers [\d.]+, /, "transformers ").replace("bfloat16", "bf16").replace("float32", "f32");
  return row.budget ? `${name} ${row.budget}` : name;
}

/** The machines behind the figures. */
export function drawMachines(results: Results): void {
  const lines = results.machines.rows.map((row) => {
    const said = Object.entries(row).filter(([name, value]) => !["kind", "schema", "case", "line"].includes(name) && value !== null && typeof value !== "object").map(([name, value]) => `${name} ${String(value)}`);
    return h("li", {}, `${said.join(", ")} (${row.line})`);
  });
  byId("machines").replaceChildren(...(lines.length > 0 ? lines : [h("li", {}, "No record.")]));
}

function distinct<T>(values: readonly T[]): T[] {
  return [...new Set(values)];
}
