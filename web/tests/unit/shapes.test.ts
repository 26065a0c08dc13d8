import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { maskRow, sees } from "../../src/tree/mask.ts";
import * as shapes from "../../src/tree/shapes.ts";
import { dfsOrder, fromAnyOrder, levelOrder, maxDepth, reorder } from "../../src/tree/tree.ts";

interface Vector {
  shape: "chain" | "balanced" | "skewed" | "random" | "bole" | "specla";
  arguments: string[];
  error?: string;
  parents: number[];
  depths: number[];
  dfs: number[];
  level: number[];
  mask: string[];
}

// Written by bench/tests/it/page_shapes.rs from canopy-kernels.
const vectors = JSON.parse(readFileSync(new URL("../shapes.json", import.meta.url), "utf8")) as {
  shapes: Vector[];
  orders: { given: number[]; parents?: number[]; mapping?: number[]; error?: string }[];
};

function make({ shape, arguments: given }: Vector) {
  const seeded = ["random", "bole", "specla"].includes(shape);
  const numbers = given.map((word, at) => (seeded && at === given.length - 1 ? BigInt(word) : Number(word)));
  return (shapes[shape] as (...values: (number | bigint)[]) => ReturnType<typeof shapes.chain>)(...numbers);
}

describe("shapes are the kernels’ shapes", () => {
  test.each(vectors.shapes.map((vector) => [`${vector.shape} ${vector.arguments.join(" ")}`, vector] as const))("%s", (_, vector) => {
    if (vector.error !== undefined) {
      expect(() => make(vector)).toThrow(vector.error);
      return;
    }
    const tree = make(vector);
    expect(tree.parents).toEqual(vector.parents);
    expect(tree.depths).toEqual(vector.depths);
    expect(dfsOrder(tree)).toEqual(vector.dfs);
    expect(levelOrder(tree)).toEqual(vector.level);
    vector.mask.forEach((hex, node) => {
      const row = BigInt(`0x${hex}`);
      for (let other = 0; other < Math.min(128, tree.parents.length); other += 1) {
        expect(sees(tree, node, other)).toBe(((row >> BigInt(other)) & 1n) === 1n);
      }
      const cells = maskRow(tree, node).reduce((sum, [from, to]) => sum + to - from, 0);
      expect(cells).toBe(tree.depths[node]);
    });
  });

  test("there are vectors of every shape", () => {
    expect(new Set(vectors.shapes.map(({ shape }) => shape)).size).toBe(6);
    expect(vectors.shapes.some(({ error }) => error !== undefined)).toBe(true);
  });
});

describe("any order", () => {
  test.each(vectors.orders.map((one) => [JSON.stringify(one.given), one] as const))("%s", (_, { given, parents, mapping, error }) => {
    if (error !== undefined) {
      // The kernels say that only node 0 is a root; the page names the root that it found.
      const words = error.replace(/; only node 0 is a root.*/, "");
      expect(() => fromAnyOrder(given)).toThrow(words);
      return;
    }
    const offered = fromAnyOrder(given);
    expect([offered.tree.parents, offered.mapping]).toEqual([parents, mapping]);
  });
});

test("renumbering keeps depths", () => {
  const tree = shapes.bole(60, 4);
  for (const order of [dfsOrder(tree), levelOrder(tree)]) {
    const { tree: moved, mapping } = reorder(tree, order);
    expect(tree.depths.map((_, node) => moved.depths[mapping[node]!])).toEqual(tree.depths);
    expect(maxDepth(moved)).toBe(maxDepth(tree));
  }
});
