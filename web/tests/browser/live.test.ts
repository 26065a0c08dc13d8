import { type ChildProcess, spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";
import type { Browser, Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { WIDTHS, type Watch, axeFindings, openBrowser, openPage, picture } from "./page.ts";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const target = process.env["CARGO_TARGET_DIR"] ?? fileURLToPath(new URL("../../../target", import.meta.url));
const binary = process.env["CANOPY_SERVER"] ?? `${target}/release/canopy-server`;

let server: ChildProcess;
let browser: Browser;
let url: string;

beforeAll(async () => {
  if (!existsSync(binary)) throw new Error(`no server at ${binary}: cargo build --release, or set CANOPY_SERVER`);
  server = spawn(binary, ["--port", "0", "--log", "warn"], { stdio: ["ignore", "pipe", "inherit"] });
  const line = new Promise<string>((resolve, reject) => {
    server.once("exit", (code) => reject(new Error(`the server ended with ${code}`)));
    server.stdout!.on("data", (data: Buffer) => /http:\S+/.test(data.toString()) && resolve(/http:\S+/.exec(data.toString())![0]));
  });
  url = `${(await line).replace(/\/$/, "")}/`;
  browser = await openBrowser();
});
afterAll(async () => {
  await browser?.close();
  server?.kill("SIGTERM");
});

describe.each(WIDTHS)("live, $name", (size) => {
  let page: Page;
  let watch: Watch;

  beforeAll(async () => {
    ({ page, watch } = await openPage(browser, url, size));
  });
  afterAll(async () => {
    await picture(page, `live-${size.name}`);
    expect(watch).toEqual({ errors: [], outside: [] });
    await page.context().close();
  });

  const generate = async (mode: string) => {
    await page.locator(`#live-form input[name=mode][value=${mode}]`).check({ force: true });
    await page.click("#live-run");
    await page.waitForFunction(() => document.getElementById("live-said")!.textContent!.startsWith("Done"));
    return page.locator("#live-text").evaluate((box) => box.textContent);
  };

  test("names the served model and hides the player", async () => {
    await expect.poll(() => page.locator("#live-state").innerText()).toContain("Live: canopy-tiny");
    await expect.poll(() => page.locator("#player").isHidden()).toBe(true);
  });

  test("every mode streams the same text, drafted and bonus tokens told apart, trees drawn", async () => {
    await page.fill("#live-form input[name=tokens]", "48");
    const texts: (string | null)[] = [];
    for (const mode of ["ar", "chain", "tree", "auto"]) {
      texts.push(await generate(mode));
      if (mode !== "chain" && mode !== "tree") continue;
      await expect.poll(() => page.locator("#live-text .token.drafted").count()).toBeGreaterThan(0);
      await expect.poll(() => page.locator("#live-text .token.bonus").count()).toBeGreaterThan(0);
      await expect.poll(() => page.locator("#round-tree g.accepted").count()).toBeGreaterThan(0);
      await expect.poll(async () => Number(await page.locator("#stat-acceptance").innerText())).toBeGreaterThan(1);
      await expect.poll(async () => Number((await page.locator("#stat-rate").innerText()).replaceAll(",", ""))).toBeGreaterThan(0);
    }
    expect(new Set(texts).size).toBe(1);
    expect(texts[0]!.length).toBeGreaterThan(60);
  });

  test("chat, a budget, and a round taken apart", async () => {
    await page.locator("#live-form input[name=kind][value=chat]").check({ force: true });
    await page.fill("#live-prompt", "Write a function that reverses a string.");
    await page.fill("#live-form input[name=budget]", "31");
    await generate("tree");
    await page.locator("#round-tree svg").waitFor();
    await page.click("#round-apart");
    await expect.poll(() => page.locator("#tree-view g.node").count()).toBeLessThanOrEqual(32);
    await expect.poll(() => page.locator("#tree-view g.node").count()).toBeGreaterThan(1);
  });

  test("Stop ends an answer, the server's refusals are shown", async () => {
    await page.locator("#live-form input[name=kind][value=completion]").check({ force: true });
    await page.fill("#live-form input[name=budget]", "");
    await page.fill("#live-form input[name=tokens]", "1500");
    await page.locator("#live-form input[name=mode][value=ar]").check({ force: true });
    await page.click("#live-run");
    await page.locator("#live-text .token").nth(3).waitFor();
    await page.keyboard.press("Escape");
    await page.waitForFunction(() => /Stopped|Done/.test(document.getElementById("live-said")!.textContent!));
    await page.fill("#live-form input[name=tokens]", "100000");
    await page.fill("#live-prompt", "word ".repeat(3000));
    await page.click("#live-run");
    await page.locator("#live-problem").waitFor();
    await expect.poll(() => page.locator("#live-problem").innerText()).toMatch(/context|length|tokens/);
    // The refusal is the server's 400, which the browser logs by itself.
    watch.errors = watch.errors.filter((text) => !/400/.test(text));
  });

  test("axe finds nothing serious", async () => {
    expect(await axeFindings(page, axe)).toEqual([]);
  });
});
