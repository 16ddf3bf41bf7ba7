//! The command line of Ottava.
#![forbid(unsafe_code)]

#[macro_use]
mod output;
mod commands;
mod device;
mod ranks;

use clap::{Parser, Subcommand};
use ottava_lm::Error;
use std::process::ExitCode;

/// Train large language models in FP8: one binary, on an NVIDIA Hopper GPU or on a CPU.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(commands::train::Train),
    Generate(commands::generate::Generate),
    Chat(commands::chat::ChatCommand),
    Serve(commands::serve::Serve),
    Eval(commands::eval::Eval),
    Prepare(commands::prepare::Prepare),
    Convert(commands::convert::Convert),
    Calibrate(commands::calibrate::Calibrate),
    Export(commands::export::Export),
    Merge(commands::merge::MergeCommand),
    Inspect(commands::inspect::Inspect),
    Plan(commands::plan::PlanCommand),
    Doctor(commands::doctor::Doctor),
    Bench(commands::bench::Bench),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version exit with 0; wrong usage with 1, since 2 is for data.
            let code = if error.use_stderr() { 1 } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    output::log_to_stderr();
    let result = match cli.command {
        Command::Train(command) => command.run(),
        Command::Generate(command) => command.run(),
        Command::Chat(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Eval(command) => command.run(),
        Command::Prepare(command) => command.run(),
        Command::Convert(command) => command.run(),
        Command::Calibrate(command) => command.run(),
        Command::Export(command) => command.run(),
        Command::Merge(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::Bench(command) => command.run(),
    };
    match result.and_then(|()| output::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let kind = if matches!(error, Error::Interrupted(_) | Error::Cancelled(_)) { "stopped" } else { "error" };
            output::last_words(&format!("{kind}: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}
