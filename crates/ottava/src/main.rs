//! The command line of Ottava.
#![forbid(unsafe_code)]

#[macro_use]
mod output;
mod commands;
mod device;
mod ranks;

#[cfg(test)]
mod docs_tests;

use clap::error::{ContextKind, ContextValue, ErrorKind as UsageKind};
use clap::{CommandFactory, Parser, Subcommand};
use ottava_common::Error;
use std::io::ErrorKind;
use std::process::ExitCode;

/// Train large language models in FP8: one binary, on an NVIDIA Hopper GPU or on a CPU.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    /// Forbid connections to servers, so that models and data come from folders and from the cache.
    #[arg(long, global = true)]
    offline: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Init(commands::init::Init),
    Import(commands::import::Import),
    Train(commands::train::Train),
    Generate(commands::generate::Generate),
    Chat(commands::chat::ChatCommand),
    Serve(commands::serve::Serve),
    Eval(commands::eval::Eval),
    Prepare(commands::prepare::Prepare),
    Logits(commands::logits::Logits),
    Convert(commands::convert::Convert),
    Calibrate(commands::calibrate::Calibrate),
    Export(commands::export::Export),
    Merge(commands::merge::MergeCommand),
    Average(commands::average::AverageCommand),
    Inspect(commands::inspect::Inspect),
    Compare(commands::compare::Compare),
    Monitor(commands::monitor::MonitorCommand),
    Plan(commands::plan::PlanCommand),
    Download(commands::download::Download),
    Push(commands::push::Push),
    Doctor(commands::doctor::Doctor),
    Config(commands::config::ConfigCommand),
    Schema(commands::schema::Schema),
    Completions(commands::completions::Completions),
    Man(commands::man::Man),
    Bench(commands::bench::Bench),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(mut error) => {
            // Help and version exit with 0. Wrong usage exits with 1, because 2 means an error in the data.
            let code = if error.use_stderr() { 1 } else { 0 };
            let remedy = usage_remedy(&error).or_else(|| setting_in(&error));
            if remedy.is_some() {
                // The tips of the parser, such as a similar option, would contradict ours.
                error.remove(ContextKind::Suggested);
                error.remove(ContextKind::SuggestedArg);
            }
            let _ = error.print();
            if let Some(remedy) = remedy {
                output::last_words(&remedy);
            }
            return ExitCode::from(code);
        }
    };
    output::log_to_stderr();
    if cli.offline {
        ottava_http::offline::forbid();
    }
    let result = match cli.command {
        Command::Init(command) => command.run(),
        Command::Import(command) => command.run(),
        Command::Train(command) => command.run(),
        Command::Generate(command) => command.run(),
        Command::Chat(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Eval(command) => command.run(),
        Command::Prepare(command) => command.run(),
        Command::Logits(command) => command.run(),
        Command::Convert(command) => command.run(),
        Command::Calibrate(command) => command.run(),
        Command::Export(command) => command.run(),
        Command::Merge(command) => command.run(),
        Command::Average(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Compare(command) => command.run(),
        Command::Monitor(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Download(command) => command.run(),
        Command::Push(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::Config(command) => command.run(),
        Command::Schema(command) => command.run(),
        Command::Completions(command) => command.run(Cli::command()),
        Command::Man(command) => command.run(Cli::command()),
        Command::Bench(command) => command.run(),
    };
    match result.and_then(|()| output::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let kind = if error.is_stop() { "stopped" } else { "error" };
            output::last_words(&format!("{kind}: {error}{}", remedy_of(&error)));
            ExitCode::from(error.exit_code())
        }
    }
}

/// Returns what to do about an error of the system, as the end of its message.
fn remedy_of(error: &Error) -> &'static str {
    let Error::Io { source, .. } = error else { return "" };
    match source.kind() {
        ErrorKind::AddrInUse => "; another program listens there: choose another port with --port",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; free space on this disk, or name a folder of another disk: `output_dir` of a run, the output of a command, or HF_HOME for downloads"
        }
        _ => "",
    }
}

/// Options of other commands, and what `init` has instead.
const NOT_OF_INIT: &[(&str, &str)] = &[
    ("--force", "`init` overwrites no file: name another one with --output"),
    ("--split", "name the split with the data set: OWNER/NAME?split=NAME"),
    ("--set", "the new file has the settings: change them there, or give `--set` to `ottava train`"),
];

/// Names of commands in other programs, and our commands.
const OTHER_COMMANDS: &[(&[&str], &str)] = &[
    (&["finetune", "fine-tune", "sft", "pretrain", "run", "resume"], "train RUN.toml"),
    (&["infer", "inference", "complete", "predict"], "generate MODEL --prompt TEXT"),
    (&["quantize", "quantise"], "export MODEL OUTPUT"),
    (&["evaluate", "perplexity", "ppl"], "eval MODEL --data FILE"),
    (&["pull", "fetch"], "download OWNER/NAME"),
    (&["upload"], "push FOLDER OWNER/NAME"),
    (&["tokenize", "preprocess"], "prepare RUN.toml"),
];

/// Returns what to write instead of a command of another program, a setting without `=`, or a file in the place of an option's value.
fn usage_remedy(error: &clap::Error) -> Option<String> {
    let args: Vec<String> = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    let command = args.first()?;
    let invalid = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    match error.kind() {
        UsageKind::InvalidSubcommand => {
            let (_, ours) = OTHER_COMMANDS.iter().find(|(names, _)| names.contains(&command.as_str()))?;
            Some(format!("`{command}` is `ottava {ours}`"))
        }
        UsageKind::UnknownArgument if ["--config", "-c"].contains(&invalid) => {
            Some(format!("the file of a run has no option: write `ottava {command} RUN.toml`"))
        }
        UsageKind::UnknownArgument if command == "init" => {
            let name = invalid.split(['=', ' ']).next()?;
            let (_, remedy) = NOT_OF_INIT.iter().find(|(option, _)| *option == name)?;
            Some(remedy.to_string())
        }
        UsageKind::UnknownArgument => {
            let at = args.iter().position(|arg| arg == "--set")?;
            let (key, value) = (args.get(at + 1)?, args.get(at + 2)?);
            (value == invalid && !key.contains('='))
                .then(|| format!("a setting has no space: write `--set {key}={value}`"))
        }
        UsageKind::MissingRequiredArgument => {
            let at = args.iter().position(|arg| arg == "--resume")?;
            let file = args.get(at + 1).filter(|file| file.ends_with(".toml"))?;
            Some(format!("`--resume` has taken the file for a folder: write `ottava {command} {file} --resume`"))
        }
        _ => None,
    }
}

/// Returns what to write instead of an unknown option of `train`, `plan`, `prepare` or `logits` if the option is a setting of Ottava or of another trainer.
fn setting_in(error: &clap::Error) -> Option<String> {
    let args: Vec<String> = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let has_settings =
        args.get(1).is_some_and(|command| ["train", "plan", "prepare", "logits"].contains(&command.as_str()));
    let (UsageKind::UnknownArgument, true) = (error.kind(), has_settings) else { return None };
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = flag.split(['=', ' ']).next().unwrap_or_default();
    let at = args.iter().position(|arg| arg == name || arg.starts_with(&format!("{name}=")))?;
    let next = args.get(at + 1).filter(|next| !next.starts_with("--")).map(String::as_str);
    let value = args[at].split_once('=').map(|(_, value)| value).or(next);
    Some(format!("`{name}`: {}", ottava_settings::describe_flag(name, value)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_names_the_setting_of_the_folder() {
        let full = Error::io("runs/x/model.safetensors")(ErrorKind::StorageFull.into());
        assert!(remedy_of(&full).contains("`output_dir`") && remedy_of(&full).contains("HF_HOME"));
        assert_eq!(remedy_of(&Error::io("x")(ErrorKind::NotFound.into())), "");
    }
}
