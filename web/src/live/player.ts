import { byId, h, segments } from "../dom.ts";
import type { Recording } from "./feed.ts";
import type { RoundPanel } from "./panel.ts";

const SPEEDS = [["0.02", "1/50"], ["0.1", "1/10"], ["1", "real time"]] as const;

/** Plays recorded answers back into the panel, at the pace they came or slower. */
export class Player {
  readonly #play = h("button", { type: "button", id: "record-play", class: "primary" }, "Play");
  readonly #step = h("button", { type: "button", id: "record-step" }, "Next round");
  readonly #choice = h("select", { id: "record" });
  readonly #about = h("p", { class: "quiet" });
  #speed = 0.02;
  #at = 0;
  #timer = 0;

  constructor(private readonly recordings: readonly Recording[], private readonly panel: RoundPanel) {
    this.#choice.append(...recordings.map(({ name }, at) => h("option", { value: at }, name)));
    this.#choice.addEventListener("change", () => this.#rewind());
    this.#play.addEventListener("click", () => (this.#timer ? this.pause() : this.#start()));
    this.#step.addEventListener("click", () => {
      this.pause();
      if (this.#ended) this.#rewind();
      this.#advance();
    });
    const speed = segments({ legend: "Pace", name: "pace", value: "0.02", choices: SPEEDS }, (value) => (this.#speed = Number(value)));
    byId("player").replaceChildren(
      h("label", { class: "wide" }, "Recorded answer", this.#choice), this.#about, speed,
      h("div", { class: "actions" }, this.#play, this.#step),
    );
    this.#rewind();
    // A first picture instead of an empty panel.
    this.#advance();
    this.#advance();
  }

  pause(): void {
    window.clearTimeout(this.#timer);
    this.#timer = 0;
    this.#play.textContent = "Play";
  }

  get #recording(): Recording {
    return this.recordings[Number(this.#choice.value)]!;
  }

  get #ended(): boolean {
    return this.#at >= this.#recording.events.length;
  }

  #rewind(): void {
    this.pause();
    this.#at = 0;
    const { mode, model, device, stats } = this.#recording;
    this.#about.textContent = `Recorded from ${model}, mode ${mode}, on ${device}: ${stats.acceptance_length.toFixed(2)} tokens a round, ${stats.tokens_per_second.toFixed(0)} tokens/s.`;
    this.panel.clear(this.#recording.prompt);
  }

  #start(): void {
    if (this.#ended) this.#rewind();
    this.#play.textContent = "Pause";
    this.#next();
  }

  #next(): void {
    if (this.#ended) return this.pause();
    const { events } = this.#recording;
    const wait = (events[this.#at]!.ms - (events[this.#at - 1]?.ms ?? events[0]!.ms)) / this.#speed;
    this.#timer = window.setTimeout(() => {
      this.#advance();
      this.#next();
    }, Math.min(wait, 1500));
  }

  #advance(): void {
    const { events, stats } = this.#recording;
    const event = events[this.#at];
    if (!event) return;
    this.#at += 1;
    const seconds = (event.ms - events[0]!.ms) / 1000;
    this.panel.add(event.tokens, event.round, seconds > 0.02 ? this.panel.tokens / seconds : null);
    if (this.#ended) this.panel.finish(stats);
  }
}
