import { expect, test } from "vitest";
// @ts-expect-error the export tool is plain JavaScript
import { crossoverCells, e2eRows, kernelRows, machineRows, otherRows, withoutRepeated } from "../../tools/rows.mjs";

test("reads the kernels' rows under either name of the median", () => {
  const base = { case: "tree_gdn.verify", variant: "fused", batch: 1, nodes: 64, shape: "bole", device: "NVIDIA H200", line: "a:1" };
  const rows = kernelRows([{ ...base, us_median: 9.5 }, { ...base, median_us: 8 }, { ...base, us_median: null }, { case: "machine", line: "a:4" }]);
  expect(rows.map(({ us }: { us: number }) => us)).toEqual([9.5, 8]);
  expect(rows[0]).toMatchObject({ who: "canopy", case: "tree_gdn.verify", nodes: 64, line: "a:1" });
});

test("a point that a newer sweep measures again is drawn from there alone", () => {
  const at = (line: string, nodes: number, us: number) => ({ case: "tree_gdn.verify", variant: "fused", batch: 1, nodes, us, line });
  const rows = withoutRepeated([at("old.jsonl:1", 64, 11), at("new.jsonl:1", 64, 10), at("old.jsonl:2", 128, 20)], ["new.jsonl"]);
  expect(rows.map(({ line }: { line: string }) => line)).toEqual(["new.jsonl:1", "old.jsonl:2"]);
});

test("tells canopy's, peers' and papers' rows apart", () => {
  const rows = kernelRows(["tree_gdn.verify", "peer.tree_gdn.verify", "paper.tree_gdn.verify"].map((name) => ({ case: name, us_median: 1, line: "" })));
  expect(rows.map(({ who }: { who: string }) => who)).toEqual(["canopy", "peer", "paper"]);
  expect(rows.every((row: { case: string }) => row.case === "tree_gdn.verify")).toBe(true);
});

test("crossover: rows of their own, or pairs of rows on the same tree", () => {
  const place = { device: "NVIDIA H200", batch: 1, line: "b:1" };
  const cells = crossoverCells([
    { ...place, case: "crossover", depth: 8, width: 4, us_serial: 40, us_solve: 10 },
    { ...place, case: "tree_gdn_serial.verify", shape: "balanced 2x5", us_median: 30 },
    { ...place, case: "tree_gdn.verify", shape: "balanced 2x5", us_median: 12 },
    { ...place, case: "tree_gdn.verify", shape: "balanced 4x3", us_median: 12 },
    { ...place, case: "peer.tree_gdn.verify", shape: "balanced 4x3", us_median: 1 },
  ]);
  expect(cells.map(({ depth, width, serial, solve }: Record<string, number>) => [depth, width, serial, solve])).toEqual([[5, 2, 30, 12], [8, 4, 40, 10]]);
});

test("end to end rows name their machine", () => {
  const [row] = e2eRows([{ case: "e2e.generate", kind: "code", mode: "tree", tokens_per_s: 100, device: "cpu", machine: { cpu: "X", cores: 2, simd: "avx2" }, line: "c:1" }]);
  expect(row).toMatchObject({ who: "canopy", prompts: "code", rate: 100, device: "X, 2 cores, avx2" });
});

test("rows that are no figure are left out", () => {
  const rows = [{ case: "train.target", steps: 3, line: "d:1" }, { line: "d:2" }, { case: 5, us_median: 1, line: "d:3" }];
  for (const pick of [kernelRows, e2eRows, crossoverCells, machineRows, otherRows]) expect(pick(rows)).toEqual([]);
});
