//! `canopy-bench compare`: the times of two result files side by side.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

/// Which files.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Example:
  canopy-bench compare before.jsonl after.jsonl
  canopy-bench compare before.jsonl after.jsonl --only blocked

Rows belong together when everything but what was measured is equal: case, variant, shape, sizes. A ratio is after by before; its
spread runs from after's tenth percentile by before's ninetieth to the other way round, and a ratio is a change when the spread
leaves 1 out. Refused: files of two schemas, of two devices, and files without a row in common.")]
pub struct CompareArgs {
    /// Rows of before
    pub before: PathBuf,
    /// Rows of after
    pub after: PathBuf,
    /// Only rows whose variant or case contains this
    #[arg(long, default_value = "", hide_default_value = true)]
    pub only: String,
}

/// What says which measurement a row is, in the order in which it is printed.
const IDENTITY: [&str; 20] = [
    "case", "variant", "shape", "keys", "order", "heads", "head_dim", "dtype", "batch", "nodes", "depth",
    "width", "rows", "context", "inputs", "outputs", "layers", "chunks", "launch", "graph",
];

/// Microseconds with their tenth and ninetieth percentile, where the row has them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Time {
    us: f64,
    spread: Option<(f64, f64)>,
}

/// The rows of a file: what is measured by what it is, newest row last.
#[derive(Debug, Default)]
struct Rows {
    times: BTreeMap<Vec<String>, Time>,
    device: Option<String>,
}

/// The schema of the rows that this build writes.
const SCHEMA: u64 = 1;

impl Rows {
    fn read(path: &Path, only: &str) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&path.display().to_string(), &text, only)
    }

    fn parse(name: &str, text: &str, only: &str) -> Result<Self> {
        let mut rows = Self::default();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let at = at + 1;
            let row: Value = serde_json::from_str(line).with_context(|| format!("{name}:{at}"))?;
            let schema = row["schema"].as_u64();
            ensure!(
                schema == Some(SCHEMA),
                "{name}:{at}: schema, expected: {SCHEMA}, got: {}",
                row["schema"]
            );
            let contains = |field: &str| row[field].as_str().is_some_and(|text| text.contains(only));
            let times = times(&row);
            if times.is_empty() || !(contains("variant") || contains("case")) {
                continue;
            }
            if let Some(device) = row["device"].as_str().or(row["gpu"].as_str()) {
                let known = rows.device.get_or_insert_with(|| device.into());
                ensure!(*known == device, "{name}:{at}: device, expected: {known}, got: {device}");
            }
            let identity: Vec<String> = IDENTITY
                .iter()
                .filter(|field| !row[**field].is_null())
                .map(|field| shown(field, &row[*field]))
                .collect();
            for (what, time) in times {
                let mut key = identity.clone();
                key.push(what);
                rows.times.insert(key, time);
            }
        }
        Ok(rows)
    }
}

/// A field as it is printed: names by themselves, numbers with their field's name.
fn shown(field: &str, value: &Value) -> String {
    value.as_str().map_or_else(|| format!("{field} {value}"), String::from)
}

/// Every time of a row by its name: `us_median` with `us_p10` and `us_p90`, `us_NAME` with `us_NAME_p10` and `us_NAME_p90`.
fn times(row: &Value) -> Vec<(String, Time)> {
    let Some(fields) = row.as_object() else { return Vec::new() };
    let measured = |name: &&String| {
        name.starts_with("us_") && !name.ends_with("_p10") && !name.ends_with("_p90") && *name != "us_floor"
    };
    let time = |name: &String| {
        let prefix = if name == "us_median" { "us" } else { name.as_str() };
        let [low, high] = ["p10", "p90"].map(|end| row[format!("{prefix}_{end}")].as_f64());
        Some((name.clone(), Time { us: row[name].as_f64()?, spread: low.zip(high) }))
    };
    fields.keys().filter(measured).filter_map(time).collect()
}

/// After by before.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio {
    ratio: f64,
    spread: Option<(f64, f64)>,
}

impl Ratio {
    fn new(before: Time, after: Time) -> Self {
        let spread = before.spread.zip(after.spread).map(|(b, a)| (a.0 / b.1, a.1 / b.0));
        Self { ratio: after.us / before.us, spread }
    }

    /// Whether it says faster or slower at all.
    fn is_change(self) -> bool {
        self.spread.is_some_and(|(low, high)| high < 1.0 || low > 1.0)
    }
}

/// The report's lines; the last one sums up.
fn report(before: &Rows, after: &Rows) -> Result<Vec<String>> {
    if let (Some(a), Some(b)) = (&before.device, &after.device) {
        ensure!(a == b, "device, expected: the same in both files, got: {a} and {b}");
    }
    let pairs: Vec<_> =
        after.times.iter().filter_map(|(key, &b)| Some((key, *before.times.get(key)?, b))).collect();
    if pairs.is_empty() {
        bail!(
            "rows, expected: some of the same case, variant and sizes in both files, got: none among {} and {} times",
            before.times.len(),
            after.times.len()
        );
    }
    let mut lines =
        vec![format!("{:>11} {:>11} {:>7}  {:15}  row", "before us", "after us", "ratio", "spread")];
    let (mut faster, mut slower, mut logs) = (0, 0, 0.0);
    for (key, b, a) in &pairs {
        let ratio = Ratio::new(*b, *a);
        let spread = ratio.spread.map_or("-".into(), |(low, high)| format!("{low:.3} to {high:.3}"));
        let mark = if ratio.is_change() { "*" } else { " " };
        lines.push(format!(
            "{:>11.2} {:>11.2} {:>7.3}{mark} {spread:15}  {}",
            b.us,
            a.us,
            ratio.ratio,
            key.join(", ")
        ));
        faster += usize::from(ratio.is_change() && ratio.ratio < 1.0);
        slower += usize::from(ratio.is_change() && ratio.ratio > 1.0);
        logs += ratio.ratio.ln();
    }
    let alone = |rows: &Rows| rows.times.len() - pairs.len();
    lines.push(format!(
        "{} times in both files: {faster} faster, {slower} slower, {} within the spread or without one; geometric mean {:.3}; {} in before alone, {} in after alone",
        pairs.len(),
        pairs.len() - faster - slower,
        (logs / pairs.len() as f64).exp(),
        alone(before),
        alone(after)
    ));
    Ok(lines)
}

/// Prints a line for every time that both files have, then a summary.
///
/// # Errors
/// A file that cannot be read, or rows that cannot be compared: another schema, another device, nothing in common.
pub fn run(args: &CompareArgs) -> Result<()> {
    let (before, after) = (Rows::read(&args.before, &args.only)?, Rows::read(&args.after, &args.only)?);
    for line in report(&before, &after)? {
        canopy_e2e::say!("{line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Ratio, Rows, Time, report};

    fn row(variant: &str, us: [f64; 3], device: &str) -> String {
        let [p10, median, p90] = us;
        format!(
            r#"{{"schema":1,"case":"tree_gdn.verify","variant":"{variant}","nodes":16,"batch":1,"us_p10":{p10},"us_median":{median},"us_p90":{p90},"us_warm":9,"device":"{device}"}}"#
        )
    }

    fn rows(lines: &[String]) -> Rows {
        Rows::parse("rows", &lines.join("\n"), "").unwrap()
    }

    #[test]
    fn a_ratio_is_a_change_when_its_spread_leaves_one_out() {
        let time = |low, us, high| Time { us, spread: Some((low, high)) };
        let ratio = Ratio::new(time(9.0, 10.0, 11.0), time(4.5, 5.0, 5.5));
        assert_eq!(ratio.ratio, 0.5);
        assert_eq!(ratio.spread, Some((4.5 / 11.0, 5.5 / 9.0)));
        assert!(ratio.is_change());
        assert!(!Ratio::new(time(9.0, 10.0, 11.0), time(9.5, 10.5, 11.5)).is_change());
        assert!(!Ratio::new(Time { us: 10.0, spread: None }, time(1.0, 1.0, 1.0)).is_change());
    }

    #[test]
    fn rows_meet_by_what_they_are_and_the_newest_counts() {
        let before = rows(&[
            row("a", [1.0, 2.0, 3.0], "X"),
            row("a", [9.0, 10.0, 11.0], "X"),
            row("b", [1.0, 1.0, 1.0], "X"),
        ]);
        let after = rows(&[row("a", [4.5, 5.0, 5.5], "X"), row("c", [1.0, 1.0, 1.0], "X")]);
        let lines = report(&before, &after).unwrap();
        assert_eq!(lines.len(), 4, "a title, the median and the warm time of a, the summary: {lines:?}");
        assert!(
            lines[1].contains("0.500*")
                && lines[1].contains("tree_gdn.verify, a, batch 1, nodes 16, us_median"),
            "{lines:?}"
        );
        assert!(lines[2].contains("1.000 ") && lines[2].ends_with("us_warm"), "{lines:?}");
        assert!(lines[3].starts_with("2 times in both files: 1 faster, 0 slower, 1 within"), "{lines:?}");
        assert!(lines[3].ends_with("2 in before alone, 2 in after alone"), "{lines:?}");
    }

    #[test]
    fn what_cannot_be_compared_is_refused_by_name() {
        let message = |before: &Rows, after: &Rows| report(before, after).unwrap_err().to_string();
        let a = rows(&[row("a", [1.0, 1.0, 1.0], "X")]);
        assert_eq!(
            message(&a, &rows(&[row("a", [1.0, 1.0, 1.0], "Y")])),
            "device, expected: the same in both files, got: X and Y"
        );
        assert!(
            message(&a, &rows(&[row("b", [1.0, 1.0, 1.0], "X")]))
                .starts_with("rows, expected: some of the same case")
        );
        let parse = |text: &str| Rows::parse("rows", text, "").unwrap_err().to_string();
        assert_eq!(parse(r#"{"schema":2,"case":"a"}"#), "rows:1: schema, expected: 1, got: 2");
        assert_eq!(parse(r#"{"case":"a"}"#), "rows:1: schema, expected: 1, got: null");
        let two = [row("a", [1.0, 1.0, 1.0], "X"), row("b", [1.0, 1.0, 1.0], "Y")].join("\n");
        assert_eq!(parse(&two), "rows:2: device, expected: X, got: Y");
    }

    #[test]
    fn only_names_rows() {
        let text = [row("fused-a", [1.0, 1.0, 1.0], "X"), row("blocked-b", [1.0, 1.0, 1.0], "X")].join("\n");
        assert_eq!(
            Rows::parse("rows", &text, "blocked").unwrap().times.len(),
            2,
            "its median and its warm time"
        );
    }
}
