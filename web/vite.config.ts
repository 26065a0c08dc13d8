import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { marked } from "marked";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

const at = (path: string) => fileURLToPath(new URL(path, import.meta.url));

/** Puts the rendered post.md into post.html. */
function post(): Plugin {
  return {
    name: "post",
    transformIndexHtml: {
      order: "pre",
      handler(html) {
        if (!html.includes("<!--post-->")) return html;
        // What scrolls on a phone must be reachable by keyboard.
        const text = marked.parse(readFileSync(at("post.md"), "utf8"), { async: false })
          .replaceAll("<pre>", '<pre tabindex="0">')
          .replaceAll("<table>", '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>')
          .replaceAll("</table>", "</table></div>");
        return html.replace("<!--post-->", () => text);
      },
    },
  };
}

export default defineConfig({
  base: "./",
  server: { proxy: { "/v1": "http://127.0.0.1:8080" } },
  plugins: [post()],
  build: {
    // The server embeds this folder; the static image copies it.
    outDir: at("../server/static"),
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    target: "es2023",
    rollupOptions: { input: { index: at("index.html"), post: at("post.html") } },
  },
  test: {
    projects: [
      { test: { name: "unit", include: ["tests/unit/**/*.test.ts"], testTimeout: 240_000 } },
      { test: { name: "browser", include: ["tests/browser/**/*.test.ts"], testTimeout: 240_000, hookTimeout: 240_000, fileParallelism: false, expect: { poll: { timeout: 100_000, interval: 20 } } } },
    ],
  },
});
