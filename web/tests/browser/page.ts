import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { type Browser, type Page, chromium } from "playwright-core";

/** The built page. */
export const BUILT = fileURLToPath(new URL("../../../server/static", import.meta.url));

export const WIDTHS = [
  { name: "desktop", width: 1280, height: 900 },
  { name: "phone", width: 390, height: 844 },
] as const;

/** Debian's chromium, or the one that CHROMIUM names. */
export async function openBrowser(): Promise<Browser> {
  const executablePath = process.env["CHROMIUM"] ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser"].find(existsSync);
  if (!executablePath) throw new Error("no chromium: apt-get install chromium, or set CHROMIUM");
  return chromium.launch({ executablePath, args: ["--no-sandbox"] });
}

/** What went wrong or out on a page. */
export interface Watch {
  errors: string[];
  outside: string[];
}

/** Opens the page and waits until it is ready. */
export async function openPage(browser: Browser, url: string, size: { width: number; height: number }, colorScheme: "light" | "dark" = "light"): Promise<{ page: Page; watch: Watch }> {
  const context = await browser.newContext({ viewport: { width: size.width, height: size.height }, colorScheme, reducedMotion: "reduce" });
  context.setDefaultTimeout(100_000);
  const page = await context.newPage();
  const watch: Watch = { errors: [], outside: [] };
  page.on("pageerror", (error) => watch.errors.push(error.message));
  page.on("console", (message) => {
    // The static site has no server: its one probe for a model answers 404.
    if (message.type() === "error" && !/v1\/models/.test(message.location().url)) watch.errors.push(message.text());
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith("data:")) watch.outside.push(request.url());
  });
  await page.goto(url);
  await page.waitForFunction(() => document.documentElement.dataset["ready"]);
  return { page, watch };
}

/** Serious and critical findings of axe-core, as text. */
export async function axeFindings(page: Page, source: string): Promise<string[]> {
  await page.evaluate(source);
  return page.evaluate(async () => {
    const { axe } = window as unknown as { axe: { run(): Promise<{ violations: { id: string; impact: string; nodes: { html: string; failureSummary: string }[] }[] }> } };
    const { violations } = await axe.run();
    return violations
      .filter(({ impact }) => impact === "serious" || impact === "critical")
      .flatMap(({ id, nodes }) => nodes.map(({ html, failureSummary }) => `${id}: ${html.slice(0, 160)} ${failureSummary.slice(0, 200)}`));
  });
}

/** Keeps a picture where SCREENSHOTS names a folder; they are looked at, not kept in the repository. */
export async function picture(page: Page, name: string): Promise<void> {
  const folder = process.env["SCREENSHOTS"];
  if (folder) await page.screenshot({ path: `${folder}/${name}.png`, fullPage: true });
}
