import { svg } from "../dom.ts";
import { layoutTree } from "../tree/layout.ts";
import { depthsOf } from "../tree/tree.ts";
import type { FeedRound } from "./feed.ts";

/** A token's text with its blanks made visible. */
export function visible(text: string): string {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

export function percent(value: number): string {
  return value >= 0.01 ? `${(value * 100).toFixed(0)}%` : "<1%";
}

interface Drawn {
  text: string;
  note: string;
  parent: number;
  kind: "accepted" | "rejected" | "bonus";
}

/** The round's nodes with the bonus token hung on the path's end, accepted children first, in depth-first order. */
export function arrange(round: FeedRound): Drawn[] {
  const accepted = new Set(round.path);
  const bonus = round.nodes.length;
  const all = [...round.nodes.map((node) => ({ text: node.text, parent: node.parent, prob: node.prob as number | null })), { text: round.bonus.text, parent: round.path.at(-1) ?? 0, prob: null }];
  const children: number[][] = all.map(() => []);
  all.forEach((node, at) => node.parent >= 0 && children[node.parent]!.push(at));
  const rank = (at: number) => (accepted.has(at) || at === bonus ? 0 : 1);
  const order: number[] = [];
  const stack = [0];
  while (stack.length > 0) {
    const at = stack.pop()!;
    order.push(at);
    stack.push(...children[at]!.sort((a, b) => rank(a) - rank(b) || a - b).toReversed());
  }
  const place = new Map(order.map((old, at) => [old, at]));
  return order.map((old) => {
    const { text, parent, prob } = all[old]!;
    return {
      text,
      note: old === bonus ? "bonus" : parent < 0 ? "root" : percent(prob!),
      parent: parent < 0 ? -1 : place.get(parent)!,
      kind: old === bonus ? "bonus" : accepted.has(old) ? "accepted" : "rejected",
    };
  });
}

const WIDE = { width: 102, height: 46, boxWidth: 80, boxHeight: 25, margin: 6, letters: 9 };
const NARROW = { ...WIDE, width: 80, boxWidth: 64, letters: 7 };

/** Draws a round: depth to the right, the accepted path along the top. */
export function drawRound(round: FeedRound): SVGSVGElement {
  const cell = window.innerWidth < 640 ? NARROW : WIDE;
  const nodes = arrange(round);
  const parents = nodes.map(({ parent }) => parent);
  const { across, along, width: rows, depth } = layoutTree({ parents, depths: depthsOf(parents) }, true);
  const x = (at: number) => cell.margin + along[at]! * cell.width;
  const y = (at: number) => cell.margin + across[at]! * cell.height;
  const width = 2 * cell.margin + depth * cell.width + cell.boxWidth;
  const height = 2 * cell.margin + (rows - 1) * cell.height + 40;
  const label = `${round.nodes.length} nodes, ${round.path.length} accepted: ${round.path.map((at) => visible(round.nodes[at]!.text)).join(" ")}, bonus ${visible(round.bonus.text)}`;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  nodes.forEach(({ parent, kind }, at) => {
    if (parent < 0) return;
    const [fromX, fromY, toX, toY] = [x(parent) + cell.boxWidth, y(parent) + cell.boxHeight / 2, x(at), y(at) + cell.boxHeight / 2];
    const middle = (fromX + toX) / 2;
    picture.append(svg("path", { class: kind, d: `M${fromX} ${fromY}C${middle} ${fromY} ${middle} ${toY} ${toX} ${toY}` }));
  });
  nodes.forEach(({ text, note, kind }, at) => {
    const shown = visible(text);
    picture.append(svg(
      "g", { class: kind, transform: `translate(${x(at)} ${y(at)})` },
      svg("title", {}, `${shown}, ${note}`),
      svg("rect", { width: cell.boxWidth, height: cell.boxHeight, rx: 6 }),
      svg("text", { x: cell.boxWidth / 2, y: 17, "text-anchor": "middle" }, shown.length > cell.letters ? `${shown.slice(0, cell.letters - 1)}…` : shown),
      svg("text", { class: "prob", x: cell.boxWidth / 2, y: 37, "text-anchor": "middle" }, note),
    ));
  });
  return picture;
}

/** The accepted path's length of every round, a bar each. */
export function drawStrip(lengths: readonly number[], shown: number): SVGSVGElement {
  const [step, height] = [10, 36];
  const most = Math.max(...lengths, 4);
  const bars = lengths.map((length, at) => {
    const size = Math.max(2, (length / most) * (height - 2));
    const bar = svg("rect", { class: at === shown ? "shown" : null, x: at * step, y: height - size, width: step - 3, height: size, rx: 1.5 }, svg("title", {}, `round ${at + 1}: ${length}`));
    return svg("g", {}, svg("rect", { class: "hit", "data-round": at, x: at * step, y: 0, width: step, height }), bar);
  });
  const label = `Accepted path length of ${lengths.length} rounds, from ${Math.min(...lengths)} to ${Math.max(...lengths)}`;
  return svg("svg", { width: lengths.length * step, height, viewBox: `0 0 ${lengths.length * step} ${height}`, role: "img", "aria-label": label }, ...bars);
}
