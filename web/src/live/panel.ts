import { byId, h, perFrame, table, tableFold } from "../dom.ts";
import type { Picked } from "../store.ts";
import { depthsOf } from "../tree/tree.ts";
import type { FeedRound, FeedStats, FeedToken } from "./feed.ts";
import { drawRound, drawStrip, percent, visible } from "./round-tree.ts";

/** Text, statistics and round trees of one answer, live or played back. */
export class RoundPanel {
  readonly #text = byId("live-text");
  readonly #tree = byId("round-tree");
  readonly #which = byId("round-which");
  readonly #previous = byId<HTMLButtonElement>("round-previous");
  readonly #next = byId<HTMLButtonElement>("round-next");
  readonly #apart = byId<HTMLButtonElement>("round-apart");
  readonly #fold = tableFold("Table: the round’s nodes", () => this.#table());
  #rounds: FeedRound[] = [];
  #shown = -1;
  #follow = true;
  #tokens = 0;
  #gained = 0;
  readonly #strip = byId("round-strip");
  readonly #drawSoon = perFrame(() => this.#draw());

  constructor(apart: (picked: Picked) => void) {
    byId("round-table").append(this.#fold);
    this.#previous.addEventListener("click", () => this.#turn(-1));
    this.#next.addEventListener("click", () => this.#turn(1));
    this.#apart.addEventListener("click", () => {
      const round = this.#rounds[this.#shown];
      if (round) apart(pickedFrom(round, `Round ${this.#shown + 1} of the answer above`));
    });
    this.#strip.addEventListener("click", (event) => {
      const round = (event.target as Element).getAttribute("data-round");
      if (round !== null) this.#show(Number(round));
    });
    this.#tree.addEventListener("keydown", (event) => {
      const by = { PageDown: 1, n: 1, PageUp: -1, p: -1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      this.#turn(by);
    });
  }

  get tokens(): number {
    return this.#tokens;
  }

  clear(prompt: string): void {
    this.#rounds = [];
    this.#shown = -1;
    this.#follow = true;
    this.#tokens = 0;
    this.#gained = 0;
    this.#text.replaceChildren(h("span", { class: "prompt" }, prompt));
    this.#tree.replaceChildren(h("p", { class: "quiet" }, "No round yet."));
    this.#strip.replaceChildren();
    this.#numbers("–", "–");
    this.#pager();
  }

  /** Adds one step's tokens and its round. */
  add(tokens: readonly FeedToken[], round: FeedRound | null, rate: number | null): void {
    const box = this.#text;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (round) {
      this.#rounds.push(round);
      this.#gained += round.path.length;
      if (this.#follow) this.#shown = this.#rounds.length - 1;
    }
    const index = this.#rounds.length - 1;
    for (const { text, origin } of tokens) {
      const span = h("span", { class: `token ${origin}`, title: `round ${index + 1}, ${origin}` }, text);
      if (round) span.addEventListener("click", () => this.#show(index));
      box.append(span);
    }
    this.#tokens += tokens.length;
    if (atEnd) box.scrollTop = box.scrollHeight;
    this.#numbers(this.#rounds.length > 0 ? (this.#gained / this.#rounds.length).toFixed(2) : "–", rate === null ? "–" : rate.toFixed(0));
    this.#pager();
    if (this.#follow) this.#drawSoon();
  }

  finish(stats: FeedStats): void {
    this.#numbers(stats.acceptance_length.toFixed(2), stats.tokens_per_second.toFixed(0));
  }

  #numbers(acceptance: string, rate: string): void {
    byId("stat-acceptance").textContent = acceptance;
    byId("stat-rate").textContent = rate;
    byId("stat-rounds").textContent = this.#rounds.length > 0 ? String(this.#rounds.length) : "–";
    byId("stat-tokens").textContent = this.#tokens > 0 ? String(this.#tokens) : "–";
  }

  #turn(by: number): void {
    this.#show(Math.min(Math.max(this.#shown + by, 0), this.#rounds.length - 1));
  }

  #show(round: number): void {
    this.#shown = round;
    this.#follow = round === this.#rounds.length - 1;
    this.#pager();
    this.#draw();
  }

  #pager(): void {
    const count = this.#rounds.length;
    this.#which.textContent = count === 0 ? "no round" : `round ${this.#shown + 1} of ${count}`;
    this.#previous.disabled = this.#shown <= 0;
    this.#next.disabled = this.#shown >= count - 1;
    this.#apart.disabled = count === 0;
  }

  #draw(): void {
    const round = this.#rounds[this.#shown];
    if (!round) return;
    this.#tree.replaceChildren(drawRound(round));
    this.#strip.replaceChildren(drawStrip(this.#rounds.map(({ path }) => path.length), this.#shown));
    if (this.#fold.open) this.#fold.open = false;
  }

  #table(): HTMLElement {
    const round = this.#rounds[this.#shown];
    if (!round) return h("p", {}, "No round yet.");
    const accepted = new Set(round.path);
    const rows = round.nodes.map((node, at) => [at, visible(node.text), node.parent, node.parent < 0 ? "root" : percent(node.prob), accepted.has(at) ? "yes" : "no"]);
    return table(`Round ${this.#shown + 1}; the bonus token is ${visible(round.bonus.text)}`, ["Node", "Token", "Parent", "Probability", "Accepted"], rows);
  }
}

/** A round's draft tree for the picker. */
export function pickedFrom(round: FeedRound, name: string): Picked {
  const parents = round.nodes.map(({ parent }) => parent);
  return {
    name,
    tree: { parents, depths: depthsOf(parents) },
    labels: round.nodes.map(({ text }) => text),
    probs: round.nodes.map(({ prob }) => prob),
  };
}
