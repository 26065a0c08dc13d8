/** The files of `results/`, which `npm run results` exports from `bench/results`. */

export type Who = "canopy" | "peer" | "paper";

export interface KernelRow {
  case: string;
  who: Who;
  variant: string;
  shape: string;
  us: number;
  device: string;
  line: string;
  batch?: number;
  nodes?: number;
  p10?: number;
  p90?: number;
  l2?: string;
  dtype?: string;
  context?: number;
  heads?: number;
  head_dim?: number;
  source?: string;
  note?: string;
}

export interface CrossoverCell {
  device: string;
  batch: number;
  depth: number;
  width: number;
  serial: number;
  solve: number;
  line: string;
}

export interface OtherRow {
  case: string;
  who: Who;
  device: string;
  line: string;
  variant?: string;
  relative_error?: number;
  megabytes?: number;
  low?: number;
  high?: number;
  text?: string;
  nodes?: number | string;
  batch?: number;
  source?: string;
}

export interface E2eRow {
  case: string;
  who: Who;
  mode: string;
  rate: number;
  device: string;
  line: string;
  model?: string;
  prompts?: string;
  batch?: number;
  context?: number;
  budget?: number;
  p10?: number;
  p90?: number;
  ratio?: number;
  acceptance?: number;
}

export interface MachineRow {
  kind: "record" | "rows";
  line: string;
  [field: string]: unknown;
}

export interface Results {
  kernels: { rows: KernelRow[]; crossover: CrossoverCell[]; other: OtherRow[] };
  e2e: { rows: E2eRow[] };
  machines: { rows: MachineRow[] };
}

async function load<T>(name: string, empty: T): Promise<T> {
  try {
    const answer = await fetch(`./results/${name}`);
    return answer.ok ? ((await answer.json()) as T) : empty;
  } catch {
    return empty;
  }
}

/** Fetches every file; one that is missing counts as empty, and its chart says that there is no data. */
export async function loadResults(): Promise<Results> {
  const [kernels, e2e, machines] = await Promise.all([
    load<Results["kernels"]>("kernels.json", { rows: [], crossover: [], other: [] }),
    load<Results["e2e"]>("e2e.json", { rows: [] }),
    load<Results["machines"]>("machines.json", { rows: [] }),
  ]);
  return { kernels, e2e, machines };
}
