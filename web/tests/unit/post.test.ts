import { readFileSync } from "node:fs";
import { expect, test } from "vitest";

const post = readFileSync(new URL("../../post.md", import.meta.url), "utf8");

test("the write-up is 1,200 to 1,800 words", () => {
  const words = post.split(/\s+/).filter(Boolean).length;
  expect(words).toBeGreaterThanOrEqual(1200);
  expect(words).toBeLessThanOrEqual(1800);
});

test("every row that it names is there and is a row", () => {
  let file = "";
  let named = 0;
  for (const [, name, line] of post.matchAll(/`([a-z0-9-]+\.jsonl)?:(\d+)`/g)) {
    file = name ?? file;
    const rows = readFileSync(new URL(`../../../bench/results/${file}`, import.meta.url), "utf8").split("\n");
    expect(JSON.parse(rows[Number(line) - 1] ?? "null"), `${file}:${line}`).toHaveProperty("case");
    named += 1;
  }
  expect(named).toBeGreaterThan(20);
});
