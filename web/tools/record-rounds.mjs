// Records rounds from a canopy-server binary for the static page: node tools/record-rounds.mjs [BINARY]
import { spawn } from "node:child_process";
import { writeFileSync } from "node:fs";
import { cpus } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const binary = process.argv[2] ?? join(here, "../../target/release/canopy-server");
const JOBS = [
  { name: "Code, tree of 16", prompt: "def fibonacci(n):", mode: "tree", budget: 16, max_tokens: 96 },
  { name: "Code, tree of 48", prompt: "def is_prime(n):\n    ", mode: "tree", budget: 48, max_tokens: 96 },
  { name: "Code, tree of 31", prompt: "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(", mode: "tree", budget: 31, max_tokens: 96 },
  { name: "Chat, tree of 24", chat: "Write a function that reverses a string.", mode: "tree", budget: 24, max_tokens: 96 },
  { name: "Code, chain", prompt: "def fibonacci(n):", mode: "chain", max_tokens: 96 },
  { name: "Code, no drafting", prompt: "def fibonacci(n):", mode: "ar", max_tokens: 64 },
];

const server = spawn(binary, ["--port", "0"], { stdio: ["ignore", "pipe", "ignore"] });
try {
  const url = await new Promise((resolve, reject) => {
    server.once("exit", (code) => reject(new Error(`${binary} ended with ${code}`)));
    server.stdout.on("data", (data) => /http:\S+/.exec(String(data)) && resolve(/http:\S+/.exec(String(data))[0].replace(/\/$/, "")));
  });
  while (!(await fetch(`${url}/ready`)).ok) await new Promise((resolve) => setTimeout(resolve, 200));
  const model = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
  await record(url, model, JOBS[0]);
  const recordings = [];
  for (const job of JOBS) recordings.push(await record(url, model, job));
  const path = join(here, "../public/results/rounds.json");
  writeFileSync(path, `${JSON.stringify(recordings)}\n`);
  console.log(`${recordings.length} answers recorded, ${recordings.reduce((sum, one) => sum + one.events.length, 0)} rounds`);
} finally {
  server.kill("SIGTERM");
}

async function record(url, model, job) {
  const body = { max_tokens: job.max_tokens, speculation: { mode: job.mode, ...(job.budget ? { budget: job.budget } : {}) }, stream: true, canopy: true };
  const path = job.chat ? "/v1/chat/completions" : "/v1/completions";
  const prompt = job.chat ? { messages: [{ role: "user", content: job.chat }] } : { prompt: job.prompt };
  const started = performance.now();
  const answer = await fetch(url + path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...body, ...prompt }) });
  if (!answer.ok) throw new Error(await answer.text());
  const result = { name: job.name, prompt: job.prompt ?? "", mode: job.mode, model, device: `${cpus()[0]?.model.trim() ?? "a CPU"}, ${cpus().length} cores`, events: [], stats: null, reason: "" };
  let rest = "";
  const decoder = new TextDecoder();
  for await (const bytes of answer.body) {
    const events = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "" || data === "[DONE]") continue;
      const { canopy, choices } = JSON.parse(data);
      if (canopy?.tokens) result.events.push({ ms: Math.round((performance.now() - started) * 10) / 10, tokens: canopy.tokens, round: tidy(canopy.round) });
      else if (canopy) Object.assign(result, { stats: canopy, reason: choices?.[0]?.finish_reason ?? "" });
    }
  }
  return result;
}

/** Probabilities to four digits: what the page shows, in a third of the bytes. */
function tidy(round) {
  if (!round) return null;
  return { ...round, nodes: round.nodes.map((node) => ({ ...node, prob: Number(node.prob.toPrecision(4)) })) };
}
