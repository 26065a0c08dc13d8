//! `canopy`: generate, measure and inspect from the command line.

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

mod against;
mod bench;
mod chart;
mod draft;
mod drift;
mod engine_args;
mod generate;
mod goldens;
mod graphs;
mod logits;
mod matrix;
mod pair;
mod profile;
mod record;
mod rounds;
mod sizes;
mod soak;
mod svg;
mod synthetic;
mod tree;

const HELP: &str = "\
Example:
  canopy generate \"def fibonacci(n):\"
  canopy tree \"def is_prime(n):\"
  canopy bench --limit 2 --max-tokens 32";

#[derive(Parser)]
#[command(name = "canopy", version, about, arg_required_else_help = true, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Chart(chart::Args),
    Draft(draft::Args),
    Drift(drift::Args),
    Generate(generate::Args),
    Goldens(goldens::Args),
    Graphs(graphs::Args),
    Logits(logits::Args),
    Profile(profile::Args),
    Rounds(rounds::Args),
    Sizes(sizes::Args),
    Soak(soak::Args),
    Tree(tree::Args),
}

/// A pass allocates and frees its activations; this allocator keeps their pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // A negative number is a value, so that its refusal names the flag and the range.
    let numbers = |arg: clap::Arg| {
        if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg }
    };
    let command = Cli::command().mut_subcommands(|command| command.mut_args(numbers));
    let parsed = command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let done = match parsed {
        Err(error) => canopy_e2e::usage::refuse(error),
        Ok(cli) => run(cli.command),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if canopy_e2e::stdout::is_reader_gone(error.as_ref()) => {
            ExitCode::from(canopy_e2e::stdout::READER_GONE)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Generate(args) => generate::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Chart(args) => chart::run(args),
        Command::Draft(args) => draft::run(args),
        Command::Drift(args) => drift::run(args),
        Command::Goldens(args) => goldens::run(args),
        Command::Graphs(args) => graphs::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Rounds(args) => rounds::run(args),
        Command::Sizes(args) => sizes::run(args),
        Command::Soak(args) => soak::run(args),
        Command::Tree(args) => tree::run(args),
    }
}
