import { expect, test } from "vitest";
import { parseParents } from "../../src/tree/parse.ts";

test("reads commas, spaces, lines and brackets", () => {
  for (const text of ["-1, 0, 0, 1", "[-1 0\n0 1]", "(-1;0;0;1)", " -1,0,0,1,\n"]) {
    const parsed = parseParents(text);
    expect(parsed.kind === "tree" && parsed.tree.parents).toEqual([-1, 0, 0, 1]);
  }
});

test("offers an order where only the order is wrong, and names the node", () => {
  const parsed = parseParents("2, 0, -1");
  expect(parsed).toMatchObject({ kind: "reorder", node: 0, mapping: [1, 2, 0] });
  expect(parsed.kind === "reorder" && parsed.tree.parents).toEqual([-1, 0, 1]);
  const later = parseParents("-1, 2, 0");
  expect(later).toMatchObject({ kind: "reorder", node: 1, message: "draft tree: node 1 has parent 2; a parent must come before its child" });
});

test("errors that no order mends name the node", () => {
  expect(parseParents("-1, 0, 9")).toMatchObject({ kind: "error", node: 2, message: "draft tree: node 2 has parent 9, but there are 3 nodes" });
  expect(parseParents("-1, 0, -1")).toMatchObject({ kind: "error", node: 2 });
  expect(parseParents("-1, 2, 1")).toMatchObject({ kind: "error", message: expect.stringContaining("its own ancestor") });
  expect(parseParents("-1, 0, x1")).toMatchObject({ kind: "error", node: 2, message: 'draft tree: node 2 has parent "x1"; expected an integer' });
  expect(parseParents("")).toMatchObject({ kind: "error", node: null, message: "draft tree: no nodes; the root is a node" });
});

test("takes 256 nodes and no more", () => {
  const chain = Array.from({ length: 257 }, (_, node) => node - 1);
  expect(parseParents(chain.slice(0, 256).join(" ")).kind).toBe("tree");
  expect(parseParents(chain.join(" "))).toMatchObject({ kind: "error", message: "draft tree: 257 nodes, at most 256" });
});
