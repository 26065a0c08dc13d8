import { h, perFrame, segments, svg, table, tableFold } from "../dom.ts";
import { METHODS, type Method, type Step, describe, finalAfter, stepsOf } from "../solve/steps.ts";
import { type KeyKind, Run, type System, finalError, makeSystem } from "../solve/system.ts";
import type { Store } from "../store.ts";
import { type Span, cellPath, maskRow } from "../tree/mask.ts";
import { type DraftTree, ancestorsOf } from "../tree/tree.ts";
import { geometry } from "./tree-view.ts";

const KINDS: readonly (readonly [KeyKind, string])[] = [["random", "random keys"], ["equal", "nearly equal keys"]];
const PACE_MS = 450;

/** Steps through one solve of the picked tree's system, and runs every solve in float32. */
export class SolveView {
  readonly element: HTMLElement;
  readonly #grid = h("div", { class: "solve-grid" });
  readonly #mini = h("div", { class: "solve-tree" });
  readonly #errors = h("div", { class: "solve-errors" });
  readonly #said = h("p", { class: "readout", id: "solve-said", "aria-live": "polite" });
  readonly #slider = h("input", { type: "range", min: 0, value: 0, id: "solve-step", "aria-label": "Step" });
  readonly #play = h("button", { type: "button", id: "solve-play" }, "Play");
  readonly #back = h("button", { type: "button", id: "solve-back", "aria-label": "One step back" }, "‹");
  readonly #next = h("button", { type: "button", id: "solve-next", "aria-label": "One step on" }, "›");
  readonly #compare = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The solves compared" });
  #chosen = METHODS[1]!;
  #seed = 1;
  #steps: Step[] = [];
  #done = 0;
  #timer = 0;
  #systems = new Map<KeyKind, System>();
  #traces = new Map<KeyKind, number[]>();

  /** `deepen` picks a chain deep enough to show what the series lose. */
  constructor(private readonly store: Store, deepen: () => void) {
    const pick = segments({ legend: "Solve", name: "solve", value: this.#chosen.id, choices: METHODS.map(({ id, name }) => [id, name] as const) }, (id) => {
      this.#chosen = METHODS.find((one) => one.id === id)!;
      this.#restart();
    });
    const redraw = h("button", { type: "button", id: "solve-draw" }, "Draw other keys");
    redraw.addEventListener("click", () => {
      this.#seed += 1;
      this.#prepare();
    });
    const deeper = h("button", { type: "button", id: "solve-deepen", class: "link" }, "Pick a chain of 33 nodes");
    deeper.addEventListener("click", deepen);
    this.#play.addEventListener("click", () => (this.#timer ? this.#pause() : this.#start()));
    this.#back.addEventListener("click", () => this.#go(this.#done - 1));
    this.#next.addEventListener("click", () => this.#go(this.#done + 1));
    this.#slider.addEventListener("input", perFrame(() => this.#go(Number(this.#slider.value))));
    const transport = h("div", { class: "transport" }, this.#back, this.#play, this.#next, this.#slider);
    const fold = tableFold("Table: error after every step", () => this.#errorTable());
    fold.id = "solve-table";
    this.element = h(
      "div", {}, pick, transport, this.#said,
      h("div", { class: "solve-panels" }, this.#grid, this.#mini, h("div", {}, this.#errors, redraw, fold)),
      this.#compare, h("p", { class: "quiet" }, "Shallow trees hide what the series lose. ", deeper),
    );
    store.onTree(() => this.#prepare());
  }

  draw(): void {
    this.#drawGrid();
    this.#drawMini();
    this.#drawErrors();
  }

  #prepare(): void {
    this.#systems = new Map(KINDS.map(([kind]) => [kind, makeSystem(this.store.tree, kind, this.#seed)]));
    this.#compare.replaceChildren(this.#comparison());
    this.#restart();
  }

  #restart(): void {
    this.#pause();
    const { tree } = this.store;
    this.#steps = stepsOf(tree, this.#chosen.method);
    this.#slider.max = String(this.#steps.length);
    this.#traces = new Map(KINDS.map(([kind]) => [kind, trace(this.#systems.get(kind)!, this.#chosen.method, this.#steps)]));
    this.element.querySelector<HTMLDetailsElement>("#solve-table")!.open = false;
    this.#go(0);
  }

  #start(): void {
    if (this.#done >= this.#steps.length) this.#go(0);
    this.#play.textContent = "Pause";
    const pace = Math.max(60, Math.min(PACE_MS, 12_000 / Math.max(1, this.#steps.length)));
    this.#timer = window.setInterval(() => {
      this.#go(this.#done + 1);
      if (this.#done >= this.#steps.length) this.#pause();
    }, pace);
  }

  #pause(): void {
    window.clearInterval(this.#timer);
    this.#timer = 0;
    this.#play.textContent = "Play";
  }

  #go(to: number): void {
    this.#done = Math.min(Math.max(to, 0), this.#steps.length);
    this.#slider.value = String(this.#done);
    this.#back.disabled = this.#done === 0;
    this.#next.disabled = this.#done === this.#steps.length;
    const step = this.#steps[this.#done - 1];
    const count = `Step ${this.#done} of ${this.#steps.length}`;
    this.#slider.setAttribute("aria-valuetext", count);
    this.#said.textContent = step ? `${count}. ${describe(step)}.` : `${count}. U starts as R${this.#steps.length === 0 ? ", and a root alone is already solved" : ""}.`;
    this.draw();
  }

  #drawGrid(): void {
    const { tree } = this.store;
    const nodes = tree.parents.length;
    const final = finalAfter(tree, this.#chosen.method, this.#steps, this.#done);
    const rows = tree.parents.map((_, node) => [node, maskRow(tree, node)] as const);
    const active = activeCells(tree, this.#steps[this.#done - 1]);
    const drawing = svg(
      "svg", { viewBox: `-0.25 -0.25 ${nodes + 0.5} ${nodes + 0.5}`, class: "mask", role: "img", "aria-label": `The matrix I + G after ${this.#done} steps; ${final.filter(Boolean).length} of ${nodes} rows are final` },
      svg("rect", { class: "mask-ground", width: nodes, height: nodes }),
      svg("path", { class: "mask-cells pending", d: cellPath(rows.filter(([node]) => !final[node])) }),
      svg("path", { class: "mask-cells solved", d: cellPath(rows.filter(([node]) => final[node])) }),
      svg("path", { class: "mask-diagonal", d: cellPath(rows.filter(([node]) => !final[node]).map(([node]) => [node, [[node, node + 1]]] as const)) }),
      svg("path", { class: "mask-diagonal solved", d: cellPath(rows.filter(([node]) => final[node]).map(([node]) => [node, [[node, node + 1]]] as const)) }),
      svg("path", { class: "mask-active", d: cellPath(active) }),
    );
    if (this.#chosen.method.kind === "blocked") drawing.append(svg("path", { class: "tiles", d: tileLines(nodes, this.#chosen.method.tile) }));
    this.#grid.replaceChildren(drawing);
  }

  #drawMini(): void {
    const { tree } = this.store;
    const final = finalAfter(tree, this.#chosen.method, this.#steps, this.#done);
    const active = new Set(activeCells(tree, this.#steps[this.#done - 1]).filter(([, spans]) => spans.length > 0).map(([node]) => node));
    const { x, y, width, height, radius } = geometry(tree, 320);
    const links = tree.parents.map((parent, node) => (parent < 0 ? "" : `M${x[parent]} ${y[parent]}L${x[node]} ${y[node]}`)).join("");
    const circles = tree.parents.map((_, node) => svg("circle", { cx: x[node], cy: y[node], r: Math.min(radius, 8), class: active.has(node) ? "active" : final[node] ? "solved" : "pending" }));
    this.#mini.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, svg("path", { class: "edge", d: links }), ...circles));
  }

  #drawErrors(): void {
    const traces = KINDS.map(([kind]) => this.#traces.get(kind)!);
    this.#errors.replaceChildren(errorChart(traces, this.#done));
  }

  #comparison(): HTMLTableElement {
    const { tree } = this.store;
    const rows = METHODS.map(({ name, method }) => {
      const steps = stepsOf(tree, method);
      const work = steps.reduce((sum, step) => sum + (step.kind === "square" ? 0 : step.work), 0);
      const squares = steps.reduce((sum, step) => sum + (step.kind === "square" ? step.work : 0), 0);
      return [name, steps.length, work.toLocaleString("en"), squares.toLocaleString("en"), ...KINDS.map(([kind]) => showError(finalError(this.#systems.get(kind)!, steps)))];
    });
    const head = ["Solve", "Sequential steps", "Multiply-adds a column", "Multiply-adds for squares", "Error, random keys", "Error, nearly equal keys"];
    return table("Every solve on this tree, in float32, against the serial recurrence in float64", head, rows);
  }

  #errorTable(): HTMLTableElement {
    const rows = [0, ...this.#steps.map((_, at) => at + 1)].map((at) => [
      at, at === 0 ? "U starts as R" : describe(this.#steps[at - 1]!), ...KINDS.map(([kind]) => showError(this.#traces.get(kind)![at]!)),
    ]);
    return table(`${this.#chosen.name}: largest error of U, relative to the largest |U|`, ["Step", "What", ...KINDS.map(([, name]) => `Error, ${name}`)], rows);
  }
}

/** The error after every step: of the final rows for a substitution, of all rows for a series. */
function trace(system: System, method: Method, steps: readonly Step[]): number[] {
  const run = new Run(system);
  const judge = (done: number) => run.error(method.kind === "blocked" ? finalAfter(system.tree, method, steps, done) : undefined);
  const errors = [judge(0)];
  steps.forEach((step, at) => {
    run.advance(step);
    errors.push(judge(at + 1));
  });
  return errors;
}

export function showError(error: number): string {
  if (!Number.isFinite(error)) return "not finite";
  return error === 0 ? "0" : error.toExponential(1).replace("e-", "e−").replace("e+", "e");
}

/** The coefficients of G that a step reads, row by row. */
function activeCells(tree: DraftTree, step: Step | undefined): (readonly [number, Span[]])[] {
  if (!step) return [];
  const ancestors = ancestorsOf(tree);
  const keep = (node: number, wanted: (at: number, depth: number) => boolean) =>
    [node, ancestors[node]!.flatMap((at, depth): Span[] => (wanted(at, depth) ? [[at, at + 1]] : []))] as const;
  const all = tree.parents.map((_, node) => node);
  switch (step.kind) {
    case "product":
      return all.slice(step.first, step.end).map((node) => keep(node, (at) => at < step.first));
    case "substitute":
      return step.rows.map((node) => keep(node, (at) => at >= step.first));
    case "term":
      return all.map((node) => keep(node, (_, depth) => tree.depths[node]! - depth >= step.power));
    case "apply":
    case "square":
      return all.map((node) => keep(node, (_, depth) => tree.depths[node]! - depth >= step.exponent));
  }
}

function tileLines(nodes: number, tile: number): string {
  let path = "";
  for (let at = tile; at < nodes; at += tile) path += `M0 ${at}H${nodes}M${at} 0V${nodes}`;
  return path;
}

/** Two lines, error on a log scale from 1e-9 up, and where the player stands. */
function errorChart(traces: readonly number[][], done: number): SVGSVGElement {
  const [width, height, left, right, top, bottom] = [360, 220, 46, 12, 26, 34];
  const steps = Math.max(1, traces[0]!.length - 1);
  const x = (step: number) => left + (step / steps) * (width - left - right);
  const most = Math.max(1e-20, ...traces.flat().filter(Number.isFinite));
  const high = Math.max(3, 3 * Math.ceil(Math.log10(most) / 3));
  const level = (error: number) => Math.min(high, Math.max(-9, error > 0 ? Math.log10(error) : -9));
  const y = (error: number) => top + ((high - level(error)) / (high + 9)) * (height - top - bottom);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `Error of U after every step on a log scale: ends at ${KINDS.map(([, name], at) => `${showError(traces[at]!.at(-1)!)} on ${name}`).join(" and ")}` });
  for (let power = -9; power <= high; power += high > 9 ? 6 : 3) {
    const at = y(10 ** power);
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }), svg("text", { class: "tick", x: left - 6, y: at, dy: "0.32em", "text-anchor": "end" }, power === 0 ? "1" : `1e${power}`.replace("-", "−")));
  }
  drawing.append(svg("text", { class: "tick", x: left, y: height - 8 }, "step 0"), svg("text", { class: "tick", x: width - right, y: height - 8, "text-anchor": "end" }, `step ${traces[0]!.length - 1}`));
  drawing.append(svg("line", { class: "now", x1: x(done), x2: x(done), y1: top, y2: height - bottom }));
  traces.forEach((errors, series) => {
    drawing.append(svg("path", { class: `line s${series}`, d: errors.map((error, at) => `${at === 0 ? "M" : "L"}${x(at).toFixed(1)} ${y(error).toFixed(1)}`).join("") }));
    drawing.append(svg("circle", { class: `dot s${series}`, cx: x(done), cy: y(errors[done]!), r: 4 }));
    const label = left + series * 130;
    drawing.append(svg("circle", { class: `dot s${series}`, cx: label + 4, cy: 11, r: 4 }), svg("text", { class: "key", x: label + 13, y: 15 }, KINDS[series]![1]));
  });
  return drawing;
}
