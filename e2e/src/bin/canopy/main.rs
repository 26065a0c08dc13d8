//! `canopy`: generate, measure and inspect from the command line.

use clap::{Parser, Subcommand};

mod logits;

#[derive(Parser)]
#[command(name = "canopy", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Logits(logits::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Logits(args) => logits::run(args),
    }
}
