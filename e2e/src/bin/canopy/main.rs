//! `canopy`: generate, measure and inspect from the command line.

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

mod bench;
mod draft;
mod engine_args;
mod generate;
mod logits;
mod matrix;
mod pair;
mod record;
mod rounds;
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
    Generate(generate::Args),
    Bench(bench::Args),
    Draft(draft::Args),
    Logits(logits::Args),
    Rounds(rounds::Args),
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
    let matches = Cli::command().mut_subcommands(|command| command.mut_args(numbers)).get_matches();
    let done = match Cli::from_arg_matches(&matches) {
        Err(error) => error.exit(),
        Ok(cli) => run(cli.command),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
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
        Command::Draft(args) => draft::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Rounds(args) => rounds::run(args),
        Command::Tree(args) => tree::run(args),
    }
}
