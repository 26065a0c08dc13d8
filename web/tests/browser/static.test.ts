import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import type { Browser, Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
// @ts-expect-error the export tool is plain JavaScript
import { crossoverCells, kernelRows, otherRows } from "../../tools/rows.mjs";
import { serveFolder } from "../support/static-server.ts";
import { BUILT, WIDTHS, type Watch, axeFindings, openBrowser, openPage, picture } from "./page.ts";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
let browser: Browser;
let site: Awaited<ReturnType<typeof serveFolder>>;

beforeAll(async () => {
  [browser, site] = await Promise.all([openBrowser(), serveFolder(BUILT)]);
});
afterAll(async () => {
  await browser?.close();
  site?.close();
});

/** Presses a button by script, enabled as it must be. */
const press = (page: Page, selector: string) => page.locator(selector).evaluate((button: HTMLButtonElement) => {
  if (button.disabled) throw new Error("the button is disabled");
  button.click();
});
const nodes = (page: Page) => page.locator("#tree-view g.node").count();

describe.each(WIDTHS)("static page, $name", (size) => {
  let page: Page;
  let watch: Watch;

  beforeAll(async () => {
    ({ page, watch } = await openPage(browser, site.url, size));
  });
  afterAll(async () => {
    await picture(page, `static-${size.name}`);
    expect(watch).toEqual({ errors: [], outside: [] });
    await page.context().close();
  });

  test("loads, and nothing is wider than the window", async () => {
    await expect.poll(() => page.title()).toContain("canopy");
    await expect.poll(() => page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth)).toBeLessThanOrEqual(0);
    const footer = await page.locator("footer").innerText();
    for (const part of ["2608.01651", "2607.16673", "2608.20961", "Repository", "Environment record", "Not affiliated"]) {
      expect(footer.toLowerCase()).toContain(part.toLowerCase());
    }
    await expect.poll(() => page.locator("#machines li").count()).toBeGreaterThan(0);
  });

  test.each([["chain", 16], ["balanced", 63], ["skewed", 28], ["random", 48], ["bole", 64], ["specla", 32]])("picks %s", async (family, count) => {
    await page.selectOption("#family", family);
    await expect.poll(() => nodes(page)).toBe(count);
    for (const order of ["level", "given", "dfs"]) {
      await page.locator(`input[name=order][value=${order}]`).check({ force: true });
      await expect.poll(() => nodes(page)).toBe(count);
    }
    await expect.poll(() => page.locator("#tree-problem").isHidden()).toBe(true);
  });

  test("picks a draft tree of the embedded model, tokens and all", async () => {
    await page.selectOption("#family", "recorded");
    await expect.poll(() => nodes(page)).toBeGreaterThan(8);
    await page.locator("#tree-view summary").click();
    await page.locator("#tree-view table").waitFor();
    await expect.poll(() => page.locator("#tree-view thead").innerText()).toContain("Probability");
  });

  test("a family's bad number is refused by name", async () => {
    await page.selectOption("#family", "balanced");
    await page.fill("#balanced-depth", "9");
    await expect.poll(() => page.locator("#tree-problem").innerText()).toBe("draft tree: 511 nodes, at most 256");
    await page.fill("#balanced-depth", "3");
    await expect.poll(() => nodes(page)).toBe(15);
  });

  test("pastes good and bad parent arrays, and takes the offer", async () => {
    await page.selectOption("#family", "pasted");
    await page.fill("#parents", "-1, 0, 0, 1, 1, 2");
    await expect.poll(() => nodes(page)).toBe(6);
    await page.fill("#parents", "-1, 0, 7");
    await expect.poll(() => page.locator("#tree-problem").innerText()).toBe("draft tree: node 2 has parent 7, but there are 3 nodes");
    await expect.poll(() => nodes(page)).toBe(6);
    await page.fill("#parents", "2, 0, -1, 0");
    await expect.poll(() => page.locator("#tree-problem").innerText()).toContain("node 0 has parent 2");
    await page.click("#mend");
    await expect.poll(() => nodes(page)).toBe(4);
    await expect.poll(() => page.inputValue("#parents")).toBe("-1, 0, 1, 1");
    await expect.poll(() => page.locator("#tree-problem").innerText()).toContain("Renumbered");
    await page.fill("#parents", Array.from({ length: 256 }, (_, node) => node - 1).join(" "));
    await expect.poll(() => nodes(page)).toBe(256);
    await page.fill("#parents", Array.from({ length: 257 }, (_, node) => node - 1).join(" "));
    await expect.poll(() => page.locator("#tree-problem").innerText()).toContain("257 nodes, at most 256");
  });

  test("a node in focus lights its root path in both views", async () => {
    await page.selectOption("#family", "balanced");
    await page.locator("#tree-view g.node").first().focus();
    for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"]) await page.keyboard.press(key);
    await expect.poll(() => page.locator("#tree-view g.node.on-path").count()).toBe(3);
    await expect.poll(() => page.locator("#mask-view .readout").innerText()).toMatch(/^Node \d+, depth 2: sees 0 → \d+ → \d+$/);
    await expect.poll(() => page.locator("#mask-view .mask-lit").getAttribute("d")).toMatch(/.{11}/);
    await page.locator(".mask-box").focus();
    await page.keyboard.press("End");
    await expect.poll(() => page.locator("#mask-view .readout").innerText()).toMatch(/^Node 62, depth 5/);
    await page.locator("#mask-view svg").hover({ position: { x: 20, y: 2 } });
    await expect.poll(() => page.locator("#mask-view .readout").innerText()).toMatch(/^Node 0/);
  });

  test.each(["blocked64", "blocked32", "blocked16", "neumann", "squaring"])("steps %s to its end and plays it", async (solve) => {
    await page.selectOption("#family", "specla");
    await page.locator(`input[name=solve][value=${solve}]`).check({ force: true });
    const said = page.locator("#solve-said");
    const total = Number(/of (\d+)/.exec(await said.innerText())![1]);
    expect(total).toBeGreaterThan(5);
    for (let step = 1; step <= total; step += 1) {
      // Once with the mouse; a press by script needs no frame, and there are dozens.
      if (step === 1) await page.click("#solve-next");
      else await press(page, "#solve-next");
      await expect.poll(() => said.innerText()).toMatch(new RegExp(`^Step ${step} of ${total}\\. .{10}`));
    }
    await expect.poll(() => page.locator(".solve-tree circle.solved, .solve-tree circle.active").count()).toBe(32);
    await expect.poll(() => page.locator("#solve-next").isDisabled()).toBe(true);
    await page.click("#solve-back");
    await expect.poll(() => said.innerText()).toContain(`Step ${total - 1} of`);
    await page.click("#solve-play");
    await expect.poll(() => page.locator("#solve-play").innerText()).toBe("Pause");
    await page.waitForFunction(() => document.getElementById("solve-play")!.textContent === "Play");
    await expect.poll(() => said.innerText()).toContain(`Step ${total} of`);
    await page.locator("#solve-table summary").click();
    await page.locator("#solve-table table").waitFor();
    await expect.poll(() => page.locator("#solve-table tbody tr").count()).toBe(total + 1);
  });

  test("the solves' errors part on nearly equal keys", async () => {
    await page.click("#solve-deepen");
    await expect.poll(() => nodes(page)).toBe(33);
    const errors = () => page.locator("#solve-view .scroll[aria-label='The solves compared'] tbody tr").evaluateAll((rows) =>
      rows.map((row) => Number(row.lastElementChild!.textContent!.replace("−", "-"))));
    await expect.poll(errors).toHaveLength(5);
    await expect.poll(async () => Math.max(...(await errors()).slice(0, 3))).toBeLessThan(1e-5);
    await expect.poll(async () => Math.min(...(await errors()).slice(3))).toBeGreaterThan(1);
  });

  test("every chart is drawn or says that it has no data, and every table opens", async () => {
    for (const id of ["rates-chart", "latency-chart", "published-chart", "crossover-chart", "accuracy-chart", "memory-chart"]) {
      const box = page.locator(`#${id}`);
      const [charts, empty] = [await box.locator("svg.chart").count(), await box.locator(".no-data").count()];
      expect(charts + empty, id).toBeGreaterThan(0);
      if (charts === 0) continue;
      await expect.poll(() => box.locator("svg.chart").first().getAttribute("aria-label"), { message: id }).toBeTruthy();
      await box.locator("summary").first().click();
      await box.locator("table tbody tr").first().waitFor();
    }
    const options = (id: string) => page.locator(`${id} option`).evaluateAll((all) => all.map((one) => (one as HTMLOptionElement).value));
    for (const kernel of await options("#latency-kernel")) {
      await page.selectOption("#latency-kernel", kernel);
      for (const shape of await options("#latency-shape")) {
        await page.selectOption("#latency-shape", shape);
        for (const batch of await page.locator("input[name=latency-batch]").all()) {
          await batch.check({ force: true });
          await expect.poll(() => page.locator("#latency-chart svg.chart path.mark, #latency-chart .no-data").count()).toBeGreaterThan(0);
        }
      }
    }
    await page.selectOption("#latency-kernel", "GDN verify");
    await page.selectOption("#latency-shape", "bole");
    await expect.poll(() => page.locator("#latency-chart svg.chart path.line").count()).toBeGreaterThan(1);
  });

  test("the memory bars follow the picked tree", async () => {
    await page.selectOption("#family", "chain");
    await page.fill("#chain-nodes", "128");
    await page.locator("input[name=memory-batch][value='16']").check({ force: true });
    const label = () => page.locator("#memory-chart svg").first().getAttribute("aria-label");
    await expect.poll(label).toContain("4.29 GB");
    await expect.poll(label).toContain("33.8 MB");
  });

  test("recorded rounds play back", async () => {
    await expect.poll(() => page.locator("#live-form").isHidden()).toBe(true);
    const recordings = await page.locator("#record option").count();
    expect(recordings).toBeGreaterThan(3);
    for (let at = 0; at < recordings; at += 1) {
      await page.selectOption("#record", String(at));
      for (let step = 0; step < 3; step += 1) await press(page, "#record-step");
      await expect.poll(() => page.locator("#live-text .token").count()).toBeGreaterThan(2);
      await page.locator("#round-tree svg").waitFor();
    }
    await page.selectOption("#record", "0");
    await page.locator("input[name=pace][value='1']").check({ force: true });
    await page.click("#record-play");
    await page.waitForFunction(() => document.getElementById("record-play")!.textContent === "Play");
    await expect.poll(() => page.locator("#live-text .token.drafted").count()).toBeGreaterThan(5);
    await expect.poll(() => page.locator("#live-text .token.bonus").count()).toBeGreaterThan(1);
    await page.click("#round-previous");
    await expect.poll(() => page.locator("#round-which").innerText()).toMatch(/^round \d+ of \d+$/);
    await page.locator("#round-strip .hit").first().click();
    await expect.poll(() => page.locator("#round-which").innerText()).toMatch(/^round 1 of /);
    await page.locator("#round-table summary").click();
    await page.locator("#round-table tbody tr").first().waitFor();
    const drawn = await page.locator("#round-tree svg g").count();
    await page.click("#round-apart");
    // The drawing has the bonus token besides the nodes.
    await expect.poll(() => nodes(page)).toBe(drawn - 1);
  });

  test("axe finds nothing serious, everything unfolded", async () => {
    expect(await axeFindings(page, axe)).toEqual([]);
  });
});

test("rows of canopy’s own kernels draw curves, the crossover map and errors as soon as there are any", async () => {
  const row = { device: "Some GPU", batch: 1, line: "fixture:1", l2: "cold" };
  const widths = [1, 2, 4];
  const depths = [2, 4, 8, 16];
  const rows = [
    ...[16, 64, 128].map((nodes) => ({ ...row, case: "tree_gdn.verify", variant: "fused", nodes, shape: "bole", us_median: nodes / 10 })),
    ...[1, 2, 4].flatMap((width) => depths.map((depth) => ({ ...row, case: "crossover", depth, width, us_serial: depth * width, us_solve: 12 }))),
    { ...row, case: "tree_gdn.accuracy", variant: "fused", relative_error: 4e-7, nodes: 32, shape: "chain" },
  ];
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
  const page = await context.newPage();
  const body = JSON.stringify({ rows: kernelRows(rows), crossover: crossoverCells(rows), other: otherRows(rows) });
  await page.route("**/results/kernels.json", (route) => route.fulfill({ contentType: "application/json", body }));
  await page.goto(site.url);
  await page.waitForFunction(() => document.documentElement.dataset["ready"]);
  await expect.poll(() => page.locator("#latency-chart svg.chart path.line.canopy").count()).toBe(1);
  await expect.poll(() => page.locator("#latency-chart svg.chart path.mark.canopy").count()).toBe(3);
  await expect.poll(() => page.locator("#latency-chart .no-data").count()).toBe(0);
  await expect.poll(() => page.locator("#crossover-chart rect.wins").count()).toBe(depths.flatMap((depth) => widths.filter((width) => depth * width >= 12)).length);
  await expect.poll(() => page.locator("#crossover-chart rect.loses").count()).toBe(depths.flatMap((depth) => widths.filter((width) => depth * width < 12)).length);
  await page.locator("#crossover-chart summary").click();
  await expect.poll(() => page.locator("#crossover-chart tbody tr").count()).toBe(12);
  await expect.poll(() => page.locator("#accuracy-chart rect.t-canopy").count()).toBe(1);
  expect(await axeFindings(page, axe)).toEqual([]);
  await picture(page, "own-rows");
  await context.close();
});

test("dark: axe finds nothing serious", async () => {
  const { page, watch } = await openPage(browser, site.url, WIDTHS[0], "dark");
  await picture(page, "static-dark");
  expect(await axeFindings(page, axe)).toEqual([]);
  expect(watch).toEqual({ errors: [], outside: [] });
  await page.context().close();
});

test("the write-up is rendered and reads well", async () => {
  const context = await browser.newContext({ viewport: { width: 390, height: 844 } });
  const page = await context.newPage();
  await page.goto(`${site.url}post.html`);
  await expect.poll(() => page.locator("article h1").count()).toBe(1);
  const words = (await page.locator("article").innerText()).split(/\s+/).length;
  expect(words).toBeGreaterThan(1200);
  await expect.poll(() => page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth)).toBeLessThanOrEqual(0);
  await picture(page, "post-phone");
  expect(await axeFindings(page, axe)).toEqual([]);
  await context.close();
});
