// Exports bench/results/*.jsonl to public/results/*.json, what the page draws. `--check` only says whether they are current.
import { readFileSync, readdirSync, writeFileSync, mkdirSync, existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { kernelRows, e2eRows, crossoverCells, machineRows, otherRows, withoutRepeated } from "./rows.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const from = join(here, "../../bench/results");
const to = join(here, "../public/results");

export function readRows(folder) {
  const rows = [];
  for (const file of readdirSync(folder).filter((name) => name.endsWith(".jsonl")).sort()) {
    readFileSync(join(folder, file), "utf8").split("\n").forEach((text, at) => {
      if (text.trim() === "") return;
      try {
        rows.push({ ...JSON.parse(text), line: `${file}:${at + 1}` });
      } catch (error) {
        console.error(`${file}:${at + 1} is no JSON object and is left out: ${error.message}`);
      }
    });
  }
  return rows;
}

// sweeps of the kernels as they are, which repeat points of earlier ones
const NEWER = ["h200-gdn-plans.jsonl", "h200-gdn-dispatch.jsonl"];

const rows = readRows(from);
const files = {
  "kernels.json": { rows: withoutRepeated(kernelRows(rows), NEWER), crossover: crossoverCells(rows), other: otherRows(rows) },
  "e2e.json": { rows: e2eRows(rows) },
  "machines.json": { rows: machineRows(rows) },
};

mkdirSync(to, { recursive: true });
let stale = 0;
for (const [name, value] of Object.entries(files)) {
  const text = `${JSON.stringify(value)}\n`;
  const path = join(to, name);
  const same = existsSync(path) && readFileSync(path, "utf8") === text;
  if (same) continue;
  stale += 1;
  if (!process.argv.includes("--check")) writeFileSync(path, text);
}
const said = Object.entries(files).map(([name, value]) => `${name} ${Object.values(value).reduce((sum, list) => sum + list.length, 0)} rows`);
console.log(`${said.join(", ")}; ${stale === 0 ? "all current" : `${stale} ${process.argv.includes("--check") ? "older than bench/results: run npm run build in web/" : "written"}`}`);
