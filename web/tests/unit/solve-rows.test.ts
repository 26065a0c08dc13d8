import { readFileSync, writeFileSync } from "node:fs";
import { expect, test } from "vitest";
import { METHODS, stepsOf } from "../../src/solve/steps.ts";
import { finalError, makeSystem } from "../../src/solve/system.ts";
import { chain } from "../../src/tree/shapes.ts";

const FILE = new URL("../../../bench/results/solve-float32.jsonl", import.meta.url);

/** The page's own float32 runs that the write-up quotes: chains, nearly equal keys, seed 1. */
const rows = [8, 16, 24, 32].flatMap((depth) => {
  const tree = chain(depth + 1);
  return METHODS.map(({ id, method }) => ({
    schema: 1, case: "page.solve_error", variant: id, shape: "chain", nodes: depth + 1, depth, keys: "nearly equal", seed: 1,
    steps: stepsOf(tree, method).length, relative_error: Number(finalError(makeSystem(tree, "equal", 1), stepsOf(tree, method)).toPrecision(3)),
    dtype: "f32", command: "npm test (CANOPY_BLESS=1 rewrites the file)",
  }));
});

test("the recorded rows are what the page computes", () => {
  if (process.env["CANOPY_BLESS"]) writeFileSync(FILE, rows.map((row) => `${JSON.stringify(row)}\n`).join(""));
  const kept = readFileSync(FILE, "utf8").trim().split("\n").map((line) => JSON.parse(line) as (typeof rows)[number]);
  expect(kept.map(({ relative_error: _, ...rest }) => rest)).toEqual(rows.map(({ relative_error: _, ...rest }) => rest));
  // Another Math.exp or Math.log may round the inputs elsewhere; the order of magnitude stays.
  kept.forEach((row, at) => expect(Math.abs(Math.log10(row.relative_error / rows[at]!.relative_error))).toBeLessThan(1));
});
