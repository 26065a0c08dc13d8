//! `canopy chart`: the table and the chart of records that `canopy bench --prompt-tokens --json` wrote.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use canopy_e2e::engine::Mode;
use serde_json::Value;

use crate::svg::{Panel, Series, document};

const EXAMPLE: &str = "\
Example:
  canopy bench --prompt-tokens 64 --batch 1,2,4 --json matrix.jsonl
  canopy chart matrix.jsonl --out matrix.svg > matrix.md";

/// Makes the table and the chart of a matrix of streams and contexts
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLE)]
pub struct Args {
    /// Files of JSON lines; other lines than `e2e.matrix` are left alone, and of equal cases the last counts
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The SVG file to write
    #[arg(long, value_name = "FILE.svg")]
    out: Option<PathBuf>,
}

/// One row of the matrix.
#[derive(Clone, Debug, PartialEq)]
struct Case {
    /// What all panels' lines share: model, device, the stated model of acceptance.
    what: String,
    context: u64,
    streams: u64,
    mode: Mode,
    rate: f64,
    ratio: Option<f64>,
    acceptance: f64,
    nodes: f64,
    plain: f64,
    round: f64,
    stages: Option<[f64; 5]>,
    first_token: Option<f64>,
}

const STAGES: [&str; 5] = ["draft", "build", "verify", "accept", "commit"];

fn case(line: &Value) -> Option<Case> {
    let number = |name: &str| line.get(name).and_then(Value::as_f64);
    let text = |name: &str| line.get(name).and_then(Value::as_str);
    let random = if line.get("random_weights").is_some_and(Value::is_u64) { ", random weights" } else { "" };
    let acceptance = text("synthetic_line").unwrap_or("the target's own acceptance");
    let stages = line.get("stages_ms_round").filter(|stages| stages.is_object());
    Some(Case {
        what: format!("{}{random}, {}; {acceptance}", text("model")?, text("device")?),
        context: line.get("context")?.as_u64()?,
        streams: line.get("streams")?.as_u64()?,
        mode: text("mode")?.parse().ok()?,
        rate: number("tokens_per_s")?,
        ratio: number("ratio_to_ar"),
        acceptance: number("acceptance_length")?,
        nodes: number("mean_budget")?,
        plain: number("plain_share")?,
        round: number("ms_round")?,
        stages: stages
            .map(|stages| STAGES.map(|name| stages.get(name).and_then(Value::as_f64).unwrap_or(0.0))),
        first_token: number("first_token_ms"),
    })
}

impl Case {
    fn key(&self) -> (&str, u64, u64, usize) {
        let mode = Mode::ALL.iter().position(|&mode| mode == self.mode);
        (&self.what, self.context, self.streams, mode.unwrap_or(0))
    }
}

/// The cases of all lines, in order, the last of equal ones.
fn cases(lines: &str) -> Result<Vec<Case>> {
    let mut cases: Vec<Case> = Vec::new();
    for (index, line) in lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let value: Value = serde_json::from_str(line).with_context(|| format!("line {}", index + 1))?;
        if value.get("case").and_then(Value::as_str) != Some("e2e.matrix") {
            continue;
        }
        let case = case(&value).with_context(|| format!("line {}: not a row of the matrix", index + 1))?;
        cases.retain(|other| other.key() != case.key());
        cases.push(case);
    }
    cases.sort_by(|a, b| a.key().cmp(&b.key()));
    Ok(cases)
}

fn table(cases: &[Case]) -> String {
    let mut out = String::new();
    for same in cases.chunk_by(|a, b| a.what == b.what) {
        out.push_str(&format!("{}\n\n", same[0].what));
        out.push_str("| context | streams | mode | tokens/s | x ar | acceptance length | nodes | plain rounds | ms a round | draft / build / verify / accept / commit, ms | first token, ms |\n");
        out.push_str("|---|---|---|---|---|---|---|---|---|---|---|\n");
        for case in same {
            let ratio = case.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"));
            let stages = case.stages.map_or("-".into(), |s| s.map(|ms| format!("{ms:.2}")).join(" / "));
            let first = case.first_token.map_or("-".into(), |ms| format!("{ms:.0}"));
            out.push_str(&format!(
                "| {} | {} | {} | {:.0} | {ratio} | {:.2} | {:.1} | {:.0} % | {:.2} | {stages} | {first} |\n",
                case.context,
                case.streams,
                case.mode,
                case.rate,
                case.acceptance,
                case.nodes,
                1e2 * case.plain,
                case.round,
            ));
        }
        out.push('\n');
    }
    out
}

/// What a panel's x axis counts.
#[derive(Clone, Copy)]
enum Axis {
    Streams,
    Context,
}

impl Axis {
    /// A case's place on this axis, and on the other one.
    fn of(self, case: &Case) -> (u64, u64) {
        match self {
            Self::Streams => (case.streams, case.context),
            Self::Context => (case.context, case.streams),
        }
    }

    /// The panel of cases that share everything but the place on this axis.
    fn panel(self, cases: &[&Case]) -> Panel {
        let mut marks: Vec<u64> = cases.iter().map(|case| self.of(case).0).collect();
        marks.sort_unstable();
        marks.dedup();
        let value = |mode: Mode, mark: u64| {
            let found = cases.iter().find(|case| case.mode == mode && self.of(case).0 == mark);
            found.map(|case| case.rate)
        };
        let modes = Mode::ALL.into_iter().filter(|&mode| cases.iter().any(|case| case.mode == mode));
        let series = modes.map(|mode| Series {
            name: mode.name().into(),
            values: marks.iter().map(|&mark| value(mode, mark)).collect(),
        });
        let other = self.of(cases[0]).1;
        let (title, x_label) = match self {
            Self::Streams => (format!("Context of {other} tokens"), "streams"),
            Self::Context => (format!("Streams: {other}"), "tokens of context"),
        };
        Panel {
            title,
            notes: vec![cases[0].what.clone()],
            x_label: x_label.into(),
            y_label: "tokens/s, all streams".into(),
            series: series.collect(),
            marks: marks.iter().map(u64::to_string).collect(),
        }
    }
}

/// A panel for every context with several numbers of streams, and for every number of streams with several contexts.
fn panels(cases: &[Case]) -> Vec<Panel> {
    let mut panels = Vec::new();
    for same in cases.chunk_by(|a, b| a.what == b.what) {
        for axis in [Axis::Streams, Axis::Context] {
            let mut others: Vec<u64> = same.iter().map(|case| axis.of(case).1).collect();
            others.sort_unstable();
            others.dedup();
            let panel = |other: u64| {
                axis.panel(&same.iter().filter(|case| axis.of(case).1 == other).collect::<Vec<_>>())
            };
            panels.extend(others.into_iter().map(panel));
        }
    }
    let several = |panel: &Panel| panel.marks.len() > 1;
    match panels.iter().any(several) {
        true => panels.into_iter().filter(several).collect(),
        false => panels,
    }
}

pub fn run(args: Args) -> Result<()> {
    let mut lines = String::new();
    for file in &args.files {
        lines.push_str(&std::fs::read_to_string(file).with_context(|| file.display().to_string())?);
        lines.push('\n');
    }
    let cases = cases(&lines)?;
    ensure!(!cases.is_empty(), "FILE: expected lines of case e2e.matrix, got none");
    canopy_e2e::say!("{}", table(&cases).trim_end());
    if let Some(out) = &args.out {
        let svg = document("Tokens per second by mode and number of streams", &panels(&cases));
        std::fs::write(out, svg).with_context(|| out.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(mode: &str, streams: u64, rate: f64) -> String {
        serde_json::json!({
            "case": "e2e.matrix", "model": "m", "device": "cpu", "random_weights": 1, "synthetic_line": "synthetic x",
            "context": 128, "streams": streams, "mode": mode, "tokens_per_s": rate, "ratio_to_ar": 2.0,
            "acceptance_length": 3.5, "mean_budget": 15.0, "plain_share": 0.25, "ms_round": 7.0,
            "stages_ms_round": {"draft": 1.0, "build": 0.1, "verify": 5.0, "accept": 0.5, "commit": 0.4},
            "first_token_ms": null,
        })
        .to_string()
    }

    #[test]
    fn the_last_of_equal_cases_counts_and_the_stated_acceptance_stands_beside_the_figures() {
        let lines = [
            line("tree", 4, 10.0),
            line("ar", 1, 5.0),
            line("tree", 4, 900.0),
            "{\"case\": \"other\"}".into(),
        ];
        let cases = cases(&lines.join("\n")).unwrap();
        assert_eq!(
            cases.iter().map(|case| (case.streams, case.rate)).collect::<Vec<_>>(),
            [(1, 5.0), (4, 900.0)]
        );
        let table = table(&cases);
        assert!(
            table.contains("synthetic x") && table.contains("| 128 | 4 | tree | 900 | 2.00 | 3.50 |"),
            "{table}"
        );
        let panels = panels(&cases);
        assert_eq!((panels.len(), panels[0].series.len(), panels[0].marks.len()), (1, 2, 2));
        assert_eq!(panels[0].series[0].values, [Some(5.0), None]);
        assert!(panels[0].notes[0].contains("synthetic x"));
    }

    #[test]
    fn broken_lines_are_named() {
        assert!(format!("{:#}", cases("{}\n{\"case\": \"e2e.matrix\"}").unwrap_err()).contains("line 2"));
    }
}
