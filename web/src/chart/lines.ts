import { h, svg } from "../dom.ts";
import { drawingWidth, logTicks, scale, short } from "./scale.ts";

/** One curve: its points, and how it is told apart besides its colour. */
export interface Series {
  name: string;
  points: { x: number; y: number; low?: number; high?: number; title: string }[];
  /** Whose figure it is: canopy's are filled, peers' hollow, papers' dashed. */
  who: "canopy" | "peer" | "paper";
}

const MARKS = ["circle", "square", "diamond", "triangle"] as const;

function mark(index: number, x: number, y: number, className: string, title: string): SVGElement {
  const r = 4.5;
  const shapes: Record<(typeof MARKS)[number], string> = {
    circle: `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
    square: `M${x - 4} ${y - 4}h8v8h-8Z`,
    diamond: `M${x} ${y - 5.5}l5.5 5.5l-5.5 5.5l-5.5 -5.5Z`,
    triangle: `M${x} ${y - 5}l5 9h-10Z`,
  };
  return svg("path", { class: className, d: shapes[MARKS[index % MARKS.length]!] }, svg("title", {}, title));
}

/** canopy's first curve has the leaf's colour, nobody else's does. */
function toneOf(series: readonly Series[]): string[] {
  const others = series.filter(({ who }, at) => who !== "canopy" || at > 0);
  return series.map((one) => (others.includes(one) ? `c${1 + (others.indexOf(one) % 7)}` : "c0"));
}

/** A chart with both axes logarithmic, and its key. */
export function lineChart(series: readonly Series[], axes: { x: string; y: string; label: string }): HTMLElement {
  const points = series.flatMap((one) => one.points);
  const width = drawingWidth();
  const [height, left, right, top, bottom] = [width < 480 ? 280 : 380, 50, 12, 18, 44];
  const range = (values: number[], pad: number): [number, number] => [Math.min(...values) / pad, Math.max(...values) * pad];
  const [lowX, highX] = range(points.map(({ x }) => x), 1.15);
  const [lowY, highY] = range(points.flatMap(({ y, low, high }) => [low ?? y, high ?? y]), 1.35);
  const x = scale("log", lowX, highX, left, width - right);
  const y = scale("log", lowY, highY, height - bottom, top);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": axes.label });
  for (const tick of logTicks(lowY, highY)) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }), svg("text", { class: "tick", x: left - 8, y: y(tick), dy: "0.32em", "text-anchor": "end" }, short(tick)));
  }
  const columns = [...new Set(points.map((point) => point.x))].sort((a, b) => a - b);
  let lastLabel = -Infinity;
  for (const tick of columns) {
    drawing.append(svg("line", { class: "grid faint", x1: x(tick), x2: x(tick), y1: top, y2: height - bottom }));
    if (x(tick) - lastLabel < 34) continue;
    lastLabel = x(tick);
    drawing.append(svg("text", { class: "tick", x: x(tick), y: height - bottom + 18, "text-anchor": "middle" }, String(tick)));
  }
  drawing.append(svg("text", { class: "axis", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, axes.x), svg("text", { class: "axis", x: left, y: 11 }, axes.y));
  const tones = toneOf(series);
  series.forEach((one, index) => {
    const tone = `${tones[index]} ${one.who}`;
    const sorted = [...one.points].sort((a, b) => a.x - b.x);
    drawing.append(svg("path", { class: `line ${tone}`, d: sorted.map((point, at) => `${at === 0 ? "M" : "L"}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("") }));
    for (const point of sorted) {
      if (point.low && point.high) drawing.append(svg("line", { class: `spread ${tone}`, x1: x(point.x), x2: x(point.x), y1: y(point.low), y2: y(point.high) }));
      drawing.append(mark(index, x(point.x), y(point.y), `mark ${tone}`, point.title));
    }
  });
  const key = h("ul", { class: "chart-key" }, ...series.map((one, index) => {
    const swatch = svg("svg", { width: 30, height: 14, viewBox: "0 0 30 14", "aria-hidden": "true" }, svg("path", { class: `line ${tones[index]} ${one.who}`, d: "M0 7H30" }), mark(index, 15, 7, `mark ${tones[index]} ${one.who}`, one.name));
    return h("li", {}, swatch, one.name);
  }));
  return h("div", {}, drawing, key);
}
