// The real OpenAI JavaScript client against the real server with the embedded pair.
//
//     node openai_client.mjs --binary PATH/canopy-server
//
// Needs the npm package `openai` where node finds it (NODE_PATH does not count for modules: run it from a folder with
// node_modules, or beside one).

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { parseArgs } from "node:util";
import { pathToFileURL } from "node:url";
import path from "node:path";

const { values } = parseArgs({ options: { binary: { type: "string" }, modules: { type: "string", default: "." } } });
const require = createRequire(pathToFileURL(path.resolve(values.modules, "x.js")));
const { default: OpenAI, BadRequestError, AuthenticationError } = require("openai");

const server = spawn(values.binary, ["--port", "0", "--api-key", "Key-1,Key-2", "--log", "warn"], {
  stdio: ["ignore", "pipe", "inherit"],
});
const exited = new Promise((resolve) => server.on("exit", (code) => resolve(code)));
try {
  const url = await new Promise((resolve, reject) => {
    server.stdout.on("data", (data) => resolve(String(data).match(/http:\S+/)[0]));
    server.on("exit", () => reject(new Error("the server ended")));
  });
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "Key-2", maxRetries: 0 });
  const model = (await client.models.list()).data[0].id;

  const prompt = "def fibonacci(n):";
  // `auto` drafts by measured times, so the same text may take more or fewer drafts.
  const tree = { speculation: { mode: "tree" } };
  const whole = await client.completions.create({ model, prompt, max_tokens: 32, ...tree });
  const text = whole.choices[0].text;
  assert.ok(text.length > 0);
  const parts = { text: "", usage: null };
  for await (const chunk of await client.completions.create({
    model, prompt, max_tokens: 32, stream: true, stream_options: { include_usage: true }, ...tree,
  })) {
    parts.text += chunk.choices[0]?.text ?? "";
    parts.usage = chunk.usage ?? parts.usage;
  }
  assert.equal(parts.text, text);
  assert.deepEqual(parts.usage, whole.usage);
  assert.ok(whole.usage.completion_tokens_details.accepted_prediction_tokens > 0);
  assert.ok(whole.usage.completion_tokens_details.rejected_prediction_tokens > 0);

  const undrafted = await client.completions.create({ model, prompt, max_tokens: 32, draft: false });
  assert.equal(undrafted.choices[0].text, text);

  const messages = [{ role: "user", content: "Write a function that reverses a string." }];
  const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 40 });
  const runner = client.chat.completions.stream({ model, messages, max_completion_tokens: 40 });
  assert.equal((await runner.finalChatCompletion()).choices[0].message.content, answer.choices[0].message.content);

  // Rounds are chunks without choices to a client that does not know them.
  let rounds = 0;
  let told = "";
  for await (const chunk of await client.completions.create({
    model, prompt, max_tokens: 32, stream: true, canopy: { rounds: true }, speculation: { mode: "tree" },
  })) {
    if (chunk.choices.length === 0) rounds += chunk.canopy.round === null ? 0 : 1;
    told += chunk.choices[0]?.text ?? "";
  }
  assert.ok(rounds > 0);
  assert.equal(told, text);

  const several = await client.completions.create({ model, prompt, max_tokens: 8, n: 2, temperature: 1, seed: 5 });
  assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1]);

  const controller = new AbortController();
  const left = await client.completions.create(
    { model, prompt, max_tokens: 1500, ignore_eos: true, stream: true }, { signal: controller.signal },
  );
  for await (const _ of left) controller.abort();
  assert.equal((await client.completions.create({ model, prompt, max_tokens: 32 })).choices[0].text, text);

  await assert.rejects(client.completions.create({ model, prompt, max_tokens: -1 }), (error) => {
    assert.ok(error instanceof BadRequestError);
    return error.param === "max_tokens";
  });
  await assert.rejects(new OpenAI({ baseURL: `${url}/v1`, apiKey: "key-2", maxRetries: 0 }).models.list(), AuthenticationError);

  server.kill("SIGTERM");
  assert.equal(await exited, 0);
  console.log("openai (JavaScript): ok");
} finally {
  server.kill("SIGKILL");
}
