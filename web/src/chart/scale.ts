/** Maps `[low, high]` onto `[from, to]` linearly or by logarithm. */
export function scale(kind: "linear" | "log", low: number, high: number, from: number, to: number): (value: number) => number {
  const by = kind === "log" ? Math.log10 : (value: number) => value;
  const [start, span] = [by(low), by(high) - by(low) || 1];
  return (value) => from + ((by(value) - start) / span) * (to - from);
}

/** Ticks of a log axis that hold `[low, high]`: powers of ten, with 2 and 5 between where the range is short. */
export function logTicks(low: number, high: number): number[] {
  const steps = high / low <= 1500 ? [1, 2, 5] : [1];
  const ticks: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of steps) {
      const tick = Number((step * 10 ** power).toPrecision(3));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

/** Round ticks of a linear axis from 0. */
export function linearTicks(high: number, count = 5): number[] {
  const raw = high / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((candidate) => candidate >= raw)!;
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, at) => Number((at * step).toPrecision(6)));
}

/** A number short enough for an axis. */
export function short(value: number): string {
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (value >= 1e3) return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  return String(Number(value.toPrecision(3)));
}

/** A number of bytes with its unit. */
export function bytes(value: number): string {
  const units = ["B", "KB", "MB", "GB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${Number(value.toPrecision(3)).toLocaleString("en")} ${units[at]}`;
}

/** A drawing's width in its own units: about the pixels there are, so that its text stays readable on a phone. */
export function drawingWidth(most = 640): number {
  return Math.max(300, Math.min(most, window.innerWidth - 64));
}
