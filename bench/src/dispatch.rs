//! `canopy-bench dispatch`: the dispatch table of `tree_gdn` from measured rows.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use canopy_kernels::tree_gdn::dispatch::Table;
use clap::Args;
use serde_json::Value;

/// Which rows make the table.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  canopy-bench dispatch bench/results/h200-gdn.jsonl --sm 90 --out canopy-kernels/src/tree_gdn/dispatch.tsv"
)]
pub struct DispatchArgs {
    /// Files of `canopy-bench sweep` and `canopy-bench crossover`, all from one kind of device
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Compute capability of that device, 90 for 9.0
    #[arg(long)]
    sm: u32,
    /// Where the table goes
    #[arg(long)]
    out: PathBuf,
}

/// Batch, nodes, depth, output type, family.
type Point = (u64, u64, u64, &'static str, &'static str);

/// Output type, family and the table's name of a variant's name in results; `None` for what no dispatcher chooses.
fn design(variant: &str) -> Option<(&'static str, &'static str, String)> {
    if let Some(rest) = variant.strip_prefix("fused-a-") {
        Some(("f32", "fused", format!("fused-{rest}")))
    } else if let Some(rest) = variant.strip_prefix("fused-b-") {
        Some(("bf16", "fused", format!("fused-{rest}")))
    } else if let Some(rest) = variant.strip_prefix("blocked-b-") {
        Some(("bf16", "blocked", format!("blocked-{rest}")))
    } else if let Some(rest) = variant.strip_prefix("serial-chain-") {
        Some(("f32", "chain", format!("chain-{rest}")))
    } else {
        None
    }
}

/// `(variant, microseconds)` of a row: one for the sweep, up to three for the crossover.
fn times(row: &Value) -> Vec<(&str, f64)> {
    let pair = |name: &str, us: &str| Some((row[name].as_str()?, row[us].as_f64()?));
    match row["case"].as_str() {
        Some("tree_gdn.verify" | "tree_gdn_serial.verify") => {
            pair("variant", "us_median").into_iter().collect()
        }
        Some("crossover") => ["solve", "solve_b", "registers"]
            .iter()
            .filter_map(|kind| pair(kind, &format!("us_{kind}")))
            .collect(),
        _ => Vec::new(),
    }
}

/// The table's text: the fastest design of every family at every measured point.
fn table(rows: &[Value], sm: u32) -> Result<String> {
    let mut best: BTreeMap<Point, (f64, String)> = BTreeMap::new();
    for row in rows {
        let [Some(batch), Some(nodes), Some(depth)] =
            ["batch", "nodes", "depth"].map(|name| row[name].as_u64())
        else {
            continue;
        };
        for (variant, us) in times(row) {
            let Some((dtype, family, name)) = design(variant) else { continue };
            let entry =
                best.entry((batch, nodes, depth, dtype, family)).or_insert((f64::INFINITY, String::new()));
            if us < entry.0 {
                *entry = (us, name);
            }
        }
    }
    ensure!(!best.is_empty(), "no row of a dispatched variant");
    let mut text = format!("{}\n", Table::HEADER);
    for ((batch, nodes, depth, dtype, _), (us, name)) in best {
        text.push_str(&format!("{sm}\t{dtype}\t{batch}\t{nodes}\t{depth}\t{name}\t{us:.2}\n"));
    }
    Table::parse(&text)?;
    Ok(text)
}

/// Reads the files and writes the table.
///
/// # Errors
/// From the files, or when they have no row that a dispatcher could use.
pub fn run(args: &DispatchArgs) -> Result<()> {
    let mut rows = Vec::new();
    for path in &args.files {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        for (at, line) in text.lines().enumerate() {
            rows.push(serde_json::from_str(line).with_context(|| format!("{}:{}", path.display(), at + 1))?);
        }
    }
    fs::write(&args.out, table(&rows, args.sm)?).with_context(|| args.out.display().to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::table;

    #[test]
    fn the_fastest_of_each_family_is_kept() {
        let sweep = |variant: &str, us: f64| json!({"case": "tree_gdn.verify", "variant": variant, "batch": 1, "nodes": 16, "depth": 15, "us_median": us});
        let mut rows = vec![
            sweep("fused-a-v32-chains", 10.0),
            sweep("fused-a-v64-chains", 9.0),
            sweep("fused-b-v32-levels", 7.0),
            sweep("blocked-b-v32", 8.0),
        ];
        rows.push(sweep("split-f32", 1.0));
        rows.push(json!({"case": "crossover", "batch": 1, "nodes": 16, "depth": 15, "registers": "serial-chain-v32", "us_registers": 4.0}));
        let text = table(&rows, 90).unwrap();
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "90\tbf16\t1\t16\t15\tblocked-v32\t8.00",
                "90\tbf16\t1\t16\t15\tfused-v32-levels\t7.00",
                "90\tf32\t1\t16\t15\tchain-v32\t4.00",
                "90\tf32\t1\t16\t15\tfused-v64-chains\t9.00"
            ]
        );
        assert!(table(&[json!({"case": "machine"})], 90).is_err());
    }
}
