import { h, svg } from "../dom.ts";
import { drawingWidth, linearTicks, logTicks, scale } from "./scale.ts";

export interface Bar {
  group: string;
  name: string;
  value: number;
  low?: number;
  high?: number;
  text: string;
  tone: string;
}

/** Horizontal bars in groups, values at their ends. */
export function barChart(bars: readonly Bar[], options: { label: string; kind: "linear" | "log"; unit: string; format: (value: number) => string }): HTMLElement {
  const groups = [...new Set(bars.map(({ group }) => group))];
  const width = drawingWidth();
  const [left, right, row, head] = [width < 480 ? 116 : 148, width < 480 ? 78 : 96, 24, 26];
  const values = bars.flatMap(({ value, high }) => [value, high ?? value]);
  const most = Math.max(...values) * 1.02;
  const least = options.kind === "log" ? Math.min(...bars.map(({ value }) => value)) / 3 : 0;
  const x = scale(options.kind, least, most, left, width - right);
  const ticks = options.kind === "log" ? logTicks(least, most).filter((_, at, all) => all.length <= width / 90 || at % Math.ceil(all.length / (width / 110)) === 0) : linearTicks(most, width < 480 ? 3 : 5);
  const height = groups.length * head + bars.length * row + 26;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart bars", role: "img", "aria-label": options.label });
  for (const tick of ticks) {
    drawing.append(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 4, y2: height - 20 }), svg("text", { class: "tick", x: x(tick), y: height - 6, "text-anchor": "middle" }, options.format(tick)));
  }
  let y = 0;
  for (const group of groups) {
    drawing.append(svg("text", { class: "group", x: 0, y: y + 18 }, group));
    y += head;
    for (const bar of bars.filter((one) => one.group === group)) {
      const end = x(bar.value);
      drawing.append(
        svg("text", { class: "bar-name", x: left - 8, y: y + 15, "text-anchor": "end" }, bar.name),
        svg("rect", { class: `bar ${bar.tone}`, x: left, y: y + 4, width: Math.max(1, end - left), height: row - 9, rx: 2 }, svg("title", {}, `${group}, ${bar.name}: ${bar.text}`)),
      );
      if (bar.low && bar.high) drawing.append(svg("path", { class: "whisker", d: `M${x(bar.low)} ${y + 11.5}H${x(bar.high)}M${x(bar.low)} ${y + 8}v7M${x(bar.high)} ${y + 8}v7` }));
      drawing.append(svg("text", { class: "bar-value", x: Math.max(end, bar.high ? x(bar.high) : 0) + 6, y: y + 15 }, bar.text));
      y += row;
    }
  }
  return h("div", { class: "bars-box", tabindex: 0, role: "group", "aria-label": options.label }, drawing, h("p", { class: "unit" }, options.unit));
}
