import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { type Recording, readEvent, serverEvents } from "../../src/live/feed.ts";
import { arrange } from "../../src/live/round-tree.ts";

test("events split anywhere, even inside a character", async () => {
  const bytes = new TextEncoder().encode('data: {"a":"→"}\n\n: keep-alive\n\ndata: one\ndata: two\r\n\r\ndata: [DONE]\n\n');
  for (const size of [1, 2, 3, 7, 100]) {
    const stream = new ReadableStream<Uint8Array>({
      start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
        controller.close();
      },
    });
    const events: string[] = [];
    for await (const data of serverEvents(stream)) events.push(data);
    // A \r\n that is cut in two is still one line end once both halves are there.
    expect(events).toEqual(['{"a":"→"}', "one\ntwo", "[DONE]"]);
  }
});

test("tells rounds, the end and errors apart", () => {
  expect(readEvent("[DONE]").kind).toBe("end");
  expect(readEvent('{"error":{"message":"no"}}')).toEqual({ kind: "failed", message: "no" });
  expect(readEvent('{"canopy":{"tokens":[],"round":null},"choices":[]}')).toEqual({ kind: "round", tokens: [], round: null });
  expect(readEvent('{"canopy":{"rounds":3},"choices":[{"finish_reason":"length"}]}')).toMatchObject({ kind: "done", reason: "length" });
  expect(readEvent('{"choices":[]}').kind).toBe("other");
});

test("reads the round event as server/README.md documents it", async () => {
  const data = '{"id":"cmpl-1","object":"text_completion","choices":[],"canopy":{"index":0,"tokens":[{"id":301,"text":" return","origin":"drafted"},{"id":64,"text":" a","origin":"bonus"}],"round":{"start":17,"nodes":[{"token":12,"text":":","parent":-1,"depth":0,"prob":1.0,"log_prob":0.0},{"token":301,"text":" return","parent":0,"depth":1,"prob":0.81,"log_prob":-0.21}],"path":[0,1],"bonus":{"token":64,"text":" a"}}}}';
  const stream = new Blob([`event: canopy\ndata: ${data}\n\ndata: {"choices":[{"text":" return a"}]}\n\n`]).stream() as ReadableStream<Uint8Array>;
  const events = [];
  for await (const one of serverEvents(stream)) events.push(readEvent(one));
  expect(events.map(({ kind }) => kind)).toEqual(["round", "other"]);
  const [first] = events;
  expect(first?.kind === "round" && first.round?.path).toEqual([0, 1]);
  expect(first?.kind === "round" && arrange(first.round!).map(({ note }) => note)).toEqual(["root", "81%", "bonus"]);
});

test("a round is drawn accepted path first, the bonus token at its end", () => {
  const nodes = [[-1, 1], [0, 0.3], [0, 0.6], [2, 0.5]].map(([parent, prob], at) => ({ token: at, text: `t${at}`, parent: parent!, prob: prob! }));
  const drawn = arrange({ start: 0, nodes, path: [0, 2], bonus: { text: "b" } });
  expect(drawn.map(({ text }) => text)).toEqual(["t0", "t2", "b", "t3", "t1"]);
  expect(drawn.map(({ kind }) => kind)).toEqual(["accepted", "accepted", "bonus", "rejected", "rejected"]);
  expect(drawn.map(({ parent }) => parent)).toEqual([-1, 0, 1, 1, 0]);
});

test("the recorded rounds hold together", () => {
  const recordings = JSON.parse(readFileSync(new URL("../../public/results/rounds.json", import.meta.url), "utf8")) as Recording[];
  expect(recordings.length).toBeGreaterThan(3);
  for (const { events, stats } of recordings) {
    const rounds = events.flatMap(({ round }) => (round ? [round] : []));
    expect(rounds).toHaveLength(stats.rounds);
    for (const { nodes, path } of rounds) {
      nodes.forEach(({ parent }, at) => expect(parent).toBeLessThan(at));
      path.forEach((at, depth) => expect(nodes[at]!.parent).toBe(depth === 0 ? -1 : path[depth - 1]));
    }
    // The last round's path may reach past the answer's end; what lies there is not counted.
    const lengths = rounds.map(({ path }) => path.length);
    const committed = stats.acceptance_length * rounds.length;
    expect(committed).toBeLessThan(lengths.reduce((sum, one) => sum + one, 0) + 1e-6);
    expect(committed).toBeGreaterThan(lengths.slice(0, -1).reduce((sum, one) => sum + one, 0));
  }
});
