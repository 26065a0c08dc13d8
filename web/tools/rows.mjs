// Picks what the page draws out of result rows. Rows come from several programs, so names of fields are read leniently;
// a row without the figure that a chart needs is left out.

const number = (...values) => values.find((value) => typeof value === "number" && Number.isFinite(value)) ?? null;
const text = (...values) => values.find((value) => typeof value === "string" && value !== "") ?? null;

function device(row) {
  const name = text(row.device, row.gpu, row.hardware, row.machine?.gpu, row.machine?.cpu, row.machine);
  if (name === "cpu") return cpuName(row);
  return name ?? "not recorded";
}

function cpuName(row) {
  const { machine } = row;
  if (!machine || typeof machine !== "object") return "CPU";
  return `${machine.cpu ?? "CPU"}, ${machine.cores ?? row.threads ?? "?"} cores${machine.simd ? `, ${[machine.simd].flat().join("+")}` : ""}`;
}

const kind = (row) => row.kind === "peer" || row.kind === "paper" ? row.kind : /^peer\./.test(row.case) ? "peer" : /^paper\./.test(row.case) ? "paper" : "canopy";
const bare = (name) => name.replace(/^(peer|paper)\./, "");

function shape(row) {
  if (typeof row.shape === "string") return row.shape;
  if (row.shape && typeof row.shape === "object") return Object.values(row.shape).join("-");
  return text(row.tree, row.family) ?? "not stated";
}

const micros = (row) => number(row.us_median, row.median_us, row.us, row.us_p50, typeof row.ms_median === "number" ? row.ms_median * 1000 : null);

/** Five digits: what a chart shows, and a third of the bytes. */
const brief = (x) => (x === null ? null : Number(x.toPrecision(5)));

/** Latency rows of every kernel: canopy's, peers', papers'. */
export function kernelRows(rows) {
  return rows.flatMap((row) => {
    const us = micros(row);
    if (typeof row.case !== "string" || us === null) return [];
    return [{
      case: bare(row.case), who: kind(row), variant: text(row.variant, row.kernel, row.name) ?? row.case,
      batch: number(row.batch, row.b), nodes: number(row.nodes, row.t), shape: shape(row), us: brief(us),
      p10: brief(number(row.us_p10, row.p10_us)), p90: brief(number(row.us_p90, row.p90_us)), l2: text(row.l2, row.cache),
      dtype: text(row.dtype), context: number(row.context), heads: number(row.heads), head_dim: number(row.head_dim),
      device: device(row), source: text(row.source), note: text(row.note), line: row.line,
    }];
  }).map(compact);
}

const point = ({ us, p10, p90, line, source, note, ...rest }) => JSON.stringify(rest);

/** Without the rows whose point a row of the `newer` files measures again. */
export function withoutRepeated(rows, newer) {
  const isNewer = (row) => newer.includes(row.line.split(":")[0]);
  const again = new Set(rows.filter(isNewer).map(point));
  return rows.filter((row) => isNewer(row) || !again.has(point(row)));
}

/** Tokens a second end to end. */
export function e2eRows(rows) {
  return rows.flatMap((row) => {
    const rate = number(row.tokens_per_s, row.tok_s);
    if (typeof row.case !== "string" || rate === null) return [];
    return [{
      case: row.case, who: kind(row), model: text(row.model, row.target) ?? (row.transformers ? "canopy-tiny" : null),
      prompts: text(row.kind), mode: text(row.mode) ?? (row.transformers ? `transformers ${row.transformers}, ${row.dtype}` : text(row.variant)),
      budget: number(row.budget), batch: number(row.batch), context: number(row.context), rate,
      p10: number(row.p10, row.min), p90: number(row.p90, row.max), ratio: number(row.ratio_to_ar),
      acceptance: number(row.acceptance_length), device: device(row), line: row.line,
    }];
  }).map(compact);
}

const depthWidth = (row) => {
  const named = /(\d+)\s*[x×]\s*(\d+)/.exec(shape(row)) ?? [];
  const depth = number(row.depth, row.max_depth, named[2] ? Number(named[2]) : null);
  const width = number(row.width, row.k, row.top_k, row.branching, named[1] ? Number(named[1]) : null);
  return depth === null || width === null ? null : { depth, width };
};

/** Serial against one solve by depth and width: crossover rows, or pairs of rows that differ in the kernel alone. */
export function crossoverCells(rows) {
  const cells = new Map();
  const put = (row, serial, solve) => {
    const place = depthWidth(row);
    if (!place) return;
    const key = [device(row), row.batch ?? 1, place.depth, place.width].join("|");
    const cell = cells.get(key) ?? { device: device(row), batch: number(row.batch) ?? 1, ...place, serial: null, solve: null, line: row.line };
    if (serial !== null) cell.serial = Math.min(cell.serial ?? Infinity, serial);
    if (solve !== null) cell.solve = Math.min(cell.solve ?? Infinity, solve);
    cells.set(key, cell);
  };
  for (const row of rows) {
    if (typeof row.case !== "string" || kind(row) !== "canopy") continue;
    if (/crossover/.test(row.case)) {
      const us = micros(row);
      const serial = number(row.us_serial, row.serial_us);
      const solve = number(row.us_solve, row.solve_us, row.us_one_solve, row.one_solve_us);
      if (serial !== null || solve !== null) put(row, serial, solve);
      else if (us !== null) /serial/.test(row.variant ?? "") ? put(row, us, null) : put(row, null, us);
    } else if (row.case === "tree_gdn_serial.verify" || (row.case === "tree_gdn.verify" && /^serial/.test(row.variant ?? ""))) put(row, micros(row), null);
    else if (row.case === "tree_gdn.verify") put(row, null, micros(row));
  }
  return [...cells.values()].filter((cell) => cell.serial !== null && cell.solve !== null)
    .sort((a, b) => a.device.localeCompare(b.device) || a.batch - b.batch || a.depth - b.depth || a.width - b.width);
}

/** Machine records, and the machines that measured rows name, each once. */
export function machineRows(rows) {
  const records = rows.filter((row) => row.case === "machine" || row.case === "env" || row.case === "bench.env");
  const named = new Map();
  for (const row of rows) {
    if (micros(row) === null && number(row.tokens_per_s) === null) continue;
    if (typeof row.case !== "string" || kind(row) !== "canopy") continue;
    const key = `${device(row)}|${row.commit ?? ""}`;
    const seen = named.get(key) ?? { device: device(row), commit: row.commit ?? null, dirty: row.dirty ?? null, driver: row.driver ?? null, toolkit: row.toolkit ?? null, rows: 0, line: row.line };
    seen.rows += 1;
    named.set(key, seen);
  }
  return [...records.map((row) => ({ kind: "record", ...row })), ...[...named.values()].map((row) => compact({ kind: "rows", ...row }))];
}

/** Figures without a latency: accuracy, scratch memory, speed-ups as published. */
export function otherRows(rows) {
  return rows.flatMap((row) => {
    if (typeof row.case !== "string" || micros(row) !== null) return [];
    if (!/accuracy|scratch|paper\.|^memory|\.memory/.test(row.case)) return [];
    const { schema: _schema, method: _method, ...rest } = row;
    return [{ ...rest, who: kind(row), case: bare(row.case), device: device(row) }];
  });
}

function compact(row) {
  return Object.fromEntries(Object.entries(row).filter(([, value]) => value !== null));
}
