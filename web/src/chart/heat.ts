import { h, svg } from "../dom.ts";
import type { CrossoverCell } from "../results.ts";
import { short } from "./scale.ts";

/** Where the one solve beats the serial walk: depth down, width across, the ratio in the cell. */
export function heatMap(cells: readonly CrossoverCell[], label: string): HTMLElement {
  const depths = [...new Set(cells.map(({ depth }) => depth))].sort((a, b) => a - b);
  const widths = [...new Set(cells.map(({ width }) => width))].sort((a, b) => a - b);
  const [left, top, side, high] = [64, 40, 72, 40];
  const [width, height] = [left + widths.length * side + 8, top + depths.length * high + 8];
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "chart heat", role: "img", "aria-label": label });
  drawing.append(svg("text", { class: "axis", x: left, y: 12 }, "children per node →"), svg("text", { class: "axis", x: 0, y: top - 8 }, "depth ↓"));
  widths.forEach((one, at) => drawing.append(svg("text", { class: "tick", x: left + (at + 0.5) * side, y: top - 8, "text-anchor": "middle" }, String(one))));
  depths.forEach((one, at) => drawing.append(svg("text", { class: "tick", x: left - 10, y: top + (at + 0.5) * high, dy: "0.32em", "text-anchor": "end" }, String(one))));
  for (const cell of cells) {
    const ratio = cell.serial / cell.solve;
    const strength = Math.min(1, Math.abs(Math.log2(ratio)) / 4);
    const [x, y] = [left + widths.indexOf(cell.width) * side, top + depths.indexOf(cell.depth) * high];
    const title = `depth ${cell.depth}, width ${cell.width}: serial ${short(cell.serial)} µs, one solve ${short(cell.solve)} µs, ${ratio.toFixed(2)}×`;
    drawing.append(
      svg("rect", { class: ratio >= 1 ? "wins" : "loses", x: x + 1, y: y + 1, width: side - 2, height: high - 2, rx: 4, "fill-opacity": (0.12 + 0.6 * strength).toFixed(2) }, svg("title", {}, title)),
      svg("text", { class: "cell", x: x + side / 2, y: y + high / 2, dy: "0.34em", "text-anchor": "middle" }, `${ratio.toFixed(ratio < 10 ? 2 : 1)}×`),
    );
  }
  const map = h("div", { class: "heat-box", tabindex: 0, role: "group", "aria-label": label }, drawing);
  return h("div", {}, map, h("p", { class: "unit" }, "Serial time over one-solve time: above 1 the one solve wins, below 1 the serial walk."));
}
