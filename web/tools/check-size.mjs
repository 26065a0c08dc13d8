// The page may weigh 300 KB gzipped at most, everything counted: node tools/check-size.mjs [FOLDER]
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const MOST = 300_000;
const folder = process.argv[2] ?? fileURLToPath(new URL("../../server/static", import.meta.url));
const files = readdirSync(folder, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
const sizes = files.map((entry) => gzipSync(readFileSync(join(entry.parentPath, entry.name))).length);
const total = sizes.reduce((sum, size) => sum + size, 0);
console.log(`${files.length} files, ${(total / 1000).toFixed(1)} KB gzipped of ${MOST / 1000}`);
process.exit(total > MOST ? 1 : 0);
