import { byId } from "../dom.ts";
import { readEvent, serverEvents } from "./feed.ts";
import type { RoundPanel } from "./panel.ts";

interface Model {
  id: string;
  context_len?: number;
  drafter?: boolean;
}

/** The prompt form over a live server. */
export class Live {
  readonly #form = byId<HTMLFormElement>("live-form");
  readonly #run = byId<HTMLButtonElement>("live-run");
  readonly #stop = byId<HTMLButtonElement>("live-stop");
  readonly #said = byId("live-said");
  readonly #problem = byId("live-problem");
  #model: Model | null = null;
  #running: AbortController | null = null;

  constructor(private readonly panel: RoundPanel) {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#generate();
    });
    this.#stop.addEventListener("click", () => this.#running?.abort());
    byId("live-key").addEventListener("change", () => void this.connect());
    this.#form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
  }

  /** Asks for the served model. False where no canopy server answers: the static site. */
  async connect(): Promise<boolean> {
    const answer = await fetch("./v1/models", { headers: this.#key() }).catch(() => null);
    if (answer?.status === 401) {
      byId("live-key-row").hidden = false;
      this.#state("This server asks for a key");
      return true;
    }
    const isJson = answer?.headers.get("content-type")?.includes("json") ?? false;
    if (answer?.status === 503 && isJson) {
      this.#state("The model is being loaded");
      await new Promise((resolve) => setTimeout(resolve, 1000));
      return this.connect();
    }
    if (!answer?.ok || !isJson) return false;
    this.#model = ((await answer.json()) as { data: Model[] }).data[0] ?? null;
    const { id, context_len, drafter } = this.#model!;
    this.#state(`Live: ${id}${context_len ? `, context ${context_len}` : ""}${drafter === false ? ", without drafter" : ""}`);
    return true;
  }

  #state(text: string): void {
    byId("live-state").textContent = text;
  }

  #key(): Record<string, string> {
    const key = byId<HTMLInputElement>("live-key").value;
    return key ? { authorization: `Bearer ${key}` } : {};
  }

  #request(): [string, object] {
    const form = new FormData(this.#form);
    const budget = String(form.get("budget") ?? "");
    const prompt = String(form.get("prompt"));
    const body = {
      ...(this.#model ? { model: this.#model.id } : {}),
      max_tokens: Number(form.get("tokens")),
      temperature: Number(form.get("temperature")),
      speculation: { mode: form.get("mode"), ...(budget === "" ? {} : { budget: Number(budget) }) },
      stream: true,
      canopy: true,
    };
    return form.get("kind") === "chat"
      ? ["./v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }]
      : ["./v1/completions", { ...body, prompt }];
  }

  async #generate(): Promise<void> {
    if (this.#running) return;
    const running = new AbortController();
    this.#running = running;
    this.#busy(true);
    this.#problem.hidden = true;
    this.#said.textContent = "";
    try {
      const [path, body] = this.#request();
      this.panel.clear("prompt" in body ? String(body.prompt) : "");
      const headers = { "content-type": "application/json", ...this.#key() };
      const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: running.signal });
      if (answer.status === 401) byId("live-key-row").hidden = false;
      if (!answer.ok || !answer.body) throw new Error(await refusal(answer));
      await this.#read(answer.body);
    } catch (error) {
      if ((error as Error).name === "AbortError") this.#said.textContent = "Stopped.";
      else this.#fail((error as Error).message);
    } finally {
      this.#running = null;
      this.#busy(false);
    }
  }

  async #read(stream: ReadableStream<Uint8Array>): Promise<void> {
    let first = 0;
    for await (const data of serverEvents(stream)) {
      const event = readEvent(data);
      if (event.kind === "end") return;
      if (event.kind === "failed") throw new Error(event.message);
      if (event.kind === "round") {
        first ||= performance.now();
        const seconds = (performance.now() - first) / 1000;
        this.panel.add(event.tokens, event.round, seconds > 0.05 ? (this.panel.tokens + event.tokens.length - 1) / seconds : null);
      } else if (event.kind === "done") {
        const { stats } = event;
        this.panel.finish(stats);
        this.#said.textContent = `Done (${event.reason}): ${stats.drafted_tokens + stats.bonus_tokens} tokens in ${stats.rounds} rounds, ${stats.drafted_tokens} of them drafted.`;
      }
    }
  }

  #fail(message: string): void {
    this.#problem.textContent = message;
    this.#problem.hidden = false;
  }

  #busy(busy: boolean): void {
    this.#run.disabled = busy;
    this.#stop.disabled = !busy;
  }
}

async function refusal(answer: Response): Promise<string> {
  const body = (await answer.json().catch(() => null)) as { error?: { message?: string } } | null;
  return body?.error?.message ?? `the server answered ${answer.status}`;
}
