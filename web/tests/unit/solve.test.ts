import { describe, expect, test } from "vitest";
import { METHODS, finalAfter, stepsOf } from "../../src/solve/steps.ts";
import { Run, finalError, makeSystem } from "../../src/solve/system.ts";
import { balanced, bole, chain, random, skewed } from "../../src/tree/shapes.ts";
import { type DraftTree, dfsOrder, levelOrder, maxDepth, reorder } from "../../src/tree/tree.ts";

const trees: [string, DraftTree][] = [
  ["root alone", chain(1)], ["chain of 40", chain(40)], ["balanced", balanced(3, 4)], ["skewed", skewed(4, 12)],
  ["random", random(130, 3)], ["Bole's, DFS", bole(100, 2)], ["Bole's, level", reorder(bole(100, 2), levelOrder(bole(100, 2))).tree],
];

describe.each(trees)("%s", (_, tree) => {
  test.each(METHODS)("$name solves random keys in float32 as the serial recurrence does", ({ method }) => {
    expect(finalError(makeSystem(tree, "random", 7), stepsOf(tree, method))).toBeLessThan(5e-6);
  });

  test.each(METHODS)("$name: a row that is called final changes no more", ({ method }) => {
    const steps = stepsOf(tree, method);
    const system = makeSystem(tree, "random", 1);
    const run = new Run(system);
    const states = [run.x.slice(), ...steps.map((step) => {
      run.advance(step);
      return run.x.slice();
    })];
    const last = states.at(-1)!;
    states.forEach((state, done) => {
      finalAfter(tree, method, steps, done).forEach((final, node) => {
        if (!final) return;
        for (let at = node * system.width; at < (node + 1) * system.width; at += 1) {
          // A series adds zeros to a final row; squares of rounded zeros are zeros too.
          expect(state[at]).toBe(last[at]);
        }
      });
    });
    expect(finalAfter(tree, method, steps, steps.length).every(Boolean)).toBe(true);
  });

  test("the blocks agree bit for bit", () => {
    const outcome = (tile: number) => {
      const run = new Run(makeSystem(tree, "equal", 5));
      stepsOf(tree, { kind: "blocked", tile }).forEach((step) => run.advance(step));
      return [...run.x];
    };
    expect(outcome(16)).toEqual(outcome(64));
    expect(outcome(32)).toEqual(outcome(256));
  });

  test("step counts: d terms, ceil(log2(d + 1)) factors, at least d substitutions with one tile", () => {
    const depth = maxDepth(tree);
    const factors = Math.ceil(Math.log2(depth + 1));
    expect(stepsOf(tree, { kind: "neumann" })).toHaveLength(depth);
    expect(stepsOf(tree, { kind: "squaring" })).toHaveLength(Math.max(0, 2 * factors - 1));
    expect(stepsOf(tree, { kind: "blocked", tile: 256 })).toHaveLength(depth);
  });

  test("substitutions do one multiply-add per ancestor pair, whatever the tile", () => {
    const pairs = tree.depths.reduce((sum, depth) => sum + depth, 0);
    for (const tile of [16, 32, 64]) {
      expect(stepsOf(tree, { kind: "blocked", tile }).reduce((sum, { work }) => sum + work, 0)).toBe(pairs);
    }
  });
});

test("level order empties the diagonal blocks of wide levels", () => {
  const tree = balanced(4, 3);
  const dfs = reorder(tree, dfsOrder(tree)).tree;
  const count = (one: DraftTree) => stepsOf(one, { kind: "blocked", tile: 16 }).length;
  expect(count(tree)).toBeLessThan(count(dfs));
});

test("nearly equal keys: substitution holds at every depth, the series lose it", () => {
  const errors = (nodes: number) => {
    const tree = chain(nodes);
    const system = makeSystem(tree, "equal", 1);
    return METHODS.map(({ method }) => finalError(system, stepsOf(tree, method)));
  };
  const [b64, b32, b16, neumann, squaring] = errors(48);
  for (const error of [b64, b32, b16]) expect(error).toBeLessThan(1e-5);
  expect(neumann).toBeGreaterThan(1);
  expect(squaring).toBeGreaterThan(1);
  expect(errors(8)[3]).toBeLessThan(1e-4);
});
