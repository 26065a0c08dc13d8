//! `canopy`: generate, measure and inspect from the command line.

use clap::{Parser, Subcommand};

mod bench;
mod draft;
mod engine_args;
mod generate;
mod logits;
mod pair;
mod record;
mod tree;

#[derive(Parser)]
#[command(name = "canopy", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Generate(generate::Args),
    Bench(bench::Args),
    Draft(draft::Args),
    Logits(logits::Args),
    Tree(tree::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Generate(args) => generate::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Draft(args) => draft::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Tree(args) => tree::run(args),
    }
}
