/** The server's round feed: `"canopy": true` in the request, server-sent events in the answer. See server/README.md. */

export interface FeedToken {
  id: number;
  text: string;
  origin: "drafted" | "bonus";
}

export interface FeedNode {
  token: number;
  text: string;
  parent: number;
  prob: number;
}

export interface FeedRound {
  start: number;
  nodes: FeedNode[];
  path: number[];
  bonus: { id?: number; text: string };
}

export interface FeedStats {
  mode: string;
  rounds: number;
  acceptance_length: number;
  tokens_per_second: number;
  drafted_tokens: number;
  bonus_tokens: number;
  seed?: number;
}

/** What one event says. */
export type FeedEvent =
  | { kind: "round"; tokens: FeedToken[]; round: FeedRound | null }
  | { kind: "done"; stats: FeedStats; reason: string }
  | { kind: "failed"; message: string }
  | { kind: "end" }
  | { kind: "other" };

/** Splits a byte stream into the data of its server-sent events. */
export async function* serverEvents(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const events = rest.replaceAll("\r\n", "\n").split("\n\n");
    rest = events.pop()!;
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length > 0) yield data.join("\n");
    }
    if (done) return;
  }
}

/** Reads one event's data. */
export function readEvent(data: string): FeedEvent {
  if (data === "[DONE]") return { kind: "end" };
  const chunk = JSON.parse(data) as {
    error?: { message: string };
    canopy?: { tokens?: FeedToken[]; round?: FeedRound | null; rounds?: number };
    choices?: { finish_reason?: string | null }[];
  };
  if (chunk.error) return { kind: "failed", message: chunk.error.message };
  const { canopy } = chunk;
  if (canopy?.tokens) return { kind: "round", tokens: canopy.tokens, round: canopy.round ?? null };
  if (typeof canopy?.rounds === "number") {
    return { kind: "done", stats: canopy as unknown as FeedStats, reason: chunk.choices?.[0]?.finish_reason ?? "" };
  }
  return { kind: "other" };
}

/** One answer as it was recorded: `ms` since the request was sent. */
export interface Recording {
  name: string;
  prompt: string;
  mode: string;
  model: string;
  device: string;
  events: { ms: number; tokens: FeedToken[]; round: FeedRound | null }[];
  stats: FeedStats;
  reason: string;
}
