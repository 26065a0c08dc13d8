import "./style.css";
import { byId, h, segments } from "./dom.ts";
import type { Recording } from "./live/feed.ts";
import { Live } from "./live/live.ts";
import { RoundPanel, pickedFrom } from "./live/panel.ts";
import { Player } from "./live/player.ts";
import { loadResults } from "./results.ts";
import { Store } from "./store.ts";
import { LatencyView, drawAccuracy, drawCrossover, drawMachines, drawPublished, drawRates } from "./views/charts-view.ts";
import { MaskView } from "./views/mask-view.ts";
import { MemoryView } from "./views/memory-view.ts";
import { ORDERS, Picker, type RecordedTree } from "./views/picker.ts";
import { SolveView } from "./views/solve-view.ts";
import { TreeView } from "./views/tree-view.ts";

const store = new Store();
const tree = new TreeView(store);
const mask = new MaskView(store);
const solve = new SolveView(store, () => picker.chain(33));
const memory = new MemoryView(store);
const picker = new Picker(store);
byId("tree-view").append(tree.element);
byId("mask-view").append(mask.element);
byId("solve-view").append(solve.element);
byId("order").append(segments({ legend: "Numbering", name: "order", value: "dfs", choices: ORDERS }, (order) => store.setOrder(order)));
picker.choose("bole");

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  tree.draw();
});

const panel = new RoundPanel((picked) => {
  picker.show(picked);
  byId("tree").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
});

/** Rounds that differ in shape, largest trees first, for the picker. */
function treesOf(recordings: readonly Recording[]): RecordedTree[] {
  return recordings.filter(({ mode }) => mode === "tree").flatMap((recording) =>
    recording.events.flatMap(({ round }, at) => {
      if (!round || round.nodes.length < 8 || at > 12) return [];
      const picked = pickedFrom(round, `${recording.name}, round ${at}: ${round.nodes.length} nodes, ${round.path.length} accepted`);
      return [{ name: picked.name, parents: [...picked.tree.parents], labels: [...picked.labels!], probs: [...picked.probs!] }];
    }));
}

async function start(): Promise<void> {
  const live = new Live(panel);
  const [results, recordings, served] = await Promise.all([
    loadResults(),
    fetch("./results/rounds.json").then((answer) => (answer.ok ? (answer.json() as Promise<Recording[]>) : [])).catch(() => []),
    live.connect(),
  ]);
  picker.setRecorded(treesOf(recordings));
  byId("live-form").hidden = !served;
  byId("player").hidden = served;
  if (!served) {
    byId("live-state").textContent = recordings.length > 0 ? "Recorded rounds: this is the static page; canopy-server serves it live" : "No server and no recorded rounds";
    if (recordings.length > 0) new Player(recordings, panel);
  }
  const { rows, crossover, other } = results.kernels;
  new LatencyView(rows);
  drawPublished(rows, other);
  drawCrossover(crossover);
  drawAccuracy(other);
  drawRates(results.e2e.rows);
  drawMachines(results);
  memory.setRows(other);
  document.documentElement.dataset["ready"] = served ? "live" : "static";
}

start().catch((error: unknown) => {
  byId("live-state").replaceChildren(h("span", { class: "problem" }, String(error)));
});
