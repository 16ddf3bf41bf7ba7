//! `ottava man`.

use clap::builder::Resettable;
use clap::{Args, Command};
use ottava_common::fs::{RealFs, create_dirs, replace_file};
use ottava_common::{Error, Result};
use std::path::PathBuf;

/// Write the manual pages of all commands.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava man ~/.local/share/man/man1
  man ottava-train")]
pub struct Man {
    /// The folder for the manual pages, such as ~/.local/share/man/man1.
    folder: PathBuf,
}

/// The exit codes and their meaning, as in docs/reliability.md.
const EXIT_CODES: [(&str, &str); 13] = [
    ("0", "success"),
    ("1", "error in the configuration, the model, a file or the command line; or a result could not be written"),
    ("2", "error in data"),
    ("3", "out of memory, in the plan or during the run"),
    ("4", "a loss, gradient, weight or logit is not finite"),
    ("5", "another rank ended, does not respond, is missing, or has other settings"),
    ("6", "a program or a server outside of Ottava failed"),
    ("7", "checkpoint missing or damaged, or the run's folder was moved"),
    ("8", "error of GPU, driver or libraries; or different bits in a repeated pass"),
    ("75", "stopped by a signal with everything saved; --resume continues"),
    ("76", "stopped by the sentinel or an alarm, with a checkpoint"),
    ("77", "stopped by an alarm without a checkpoint"),
    ("130", "stopped by a signal with nothing to save, or by a second signal"),
];

/// The environment variables that commands read, and their meaning.
const VARIABLES: [(&str, &str); 18] = [
    ("CUDA_VISIBLE_DEVICES", "the GPUs that the program sees"),
    ("OTTAVA_CACHE_DIR", "the folder of compiled kernels and of chosen GEMM algorithms; by default ~/.cache/ottava"),
    ("OTTAVA_LIBRARY_PATH", "folders with CUDA libraries, separated by colons; they are searched first"),
    ("OTTAVA_OFFLINE", "1 forbids connections to servers, as --offline does"),
    ("OTTAVA_API_KEY", "the key that clients of serve must send"),
    ("HF_TOKEN", "the token of the Hugging Face Hub; otherwise it is read from HF_HOME/token"),
    ("HF_HOME", "the folder of the token and of the cache of the Hub; by default ~/.cache/huggingface"),
    ("HF_ENDPOINT", "the address of another server with the protocol of the Hub"),
    ("AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", "the keys of a store with the protocol of S3"),
    ("AWS_ENDPOINT_URL, AWS_REGION", "the address and the region of such a store"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "the JSON file of an account of Google Cloud Storage"),
    (
        "GS_ACCESS_KEY_ID, GS_SECRET_ACCESS_KEY, GOOGLE_OAUTH_ACCESS_TOKEN",
        "an HMAC key of Google Cloud Storage, or a token",
    ),
    (
        "AZURE_STORAGE_CONNECTION_STRING",
        "the connection string of an account of Azure; the variables below are then not read",
    ),
    (
        "AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN",
        "the account of Azure, with its key or a shared access signature",
    ),
    ("MLFLOW_TRACKING_URI", "the server of MLflow"),
    ("TRACKIO_SERVER_URL", "the server of Trackio"),
    ("NO_COLOR", "any text switches colours off"),
    ("RUST_LOG", "the level of the log: error, warn, info (default) or debug"),
];

impl Man {
    /// Writes the manual pages of `program`.
    pub fn run(self, mut program: Command) -> Result<()> {
        program.build();
        create_dirs(&RealFs, &self.folder)?;
        let mut pages = Vec::new();
        collect(&program, &mut pages);
        for page in &pages {
            let name = page.get_display_name().unwrap_or(page.get_name()).to_string();
            let path = self.folder.join(format!("{name}.1"));
            replace_file(&RealFs, &path, &rendered(page, &name).map_err(Error::io(&path))?)?;
        }
        out!("wrote {} pages to {}", pages.len(), self.folder.display());
        Ok(())
    }
}

/// Lists `command` and all commands below it.
fn collect(command: &Command, pages: &mut Vec<Command>) {
    pages.push(command.clone());
    command.get_subcommands().filter(|inner| inner.get_name() != "help").for_each(|inner| collect(inner, pages));
}

/// Returns the page `name` of a command. Its examples, exit codes and variables have sections of their own.
fn rendered(command: &Command, name: &str) -> std::io::Result<Vec<u8>> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone().after_help(Resettable::Reset)).title(name).render(&mut text)?;
    let (heading, lines) = match help.split_once('\n') {
        Some(("Example:" | "Examples:", lines)) => ("EXAMPLES", lines),
        _ => ("NOTES", help.as_str()),
    };
    if !lines.is_empty() {
        let lines: String = lines.lines().map(|line| format!("{}\n", escaped(line))).collect();
        text.extend(format!(".SH {heading}\n.nf\n{lines}.fi\n").bytes());
    }
    for (heading, rows) in [("EXIT STATUS", &EXIT_CODES[..]), ("ENVIRONMENT", &VARIABLES[..])] {
        let rows: String = rows
            .iter()
            .map(|(name, meaning)| format!(".TP\n\\fB{}\\fR\n{}\n", escaped(name), escaped(meaning)))
            .collect();
        text.extend(format!(".SH {heading}\n{rows}").bytes());
    }
    Ok(text)
}

/// Escapes a line of text for roff.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory;

    #[test]
    fn each_command_has_a_page_with_its_examples_and_exit_codes() {
        let mut program = Cli::command();
        program.build();
        let mut pages = Vec::new();
        collect(&program, &mut pages);
        let names: Vec<_> = pages.iter().filter_map(|page| page.get_display_name()).collect();
        for name in ["ottava-train", "ottava-bench-train", "ottava-config-migrate"] {
            assert!(names.contains(&name), "no {name} in {names:?}");
        }
        let train = pages.iter().find(|page| page.get_display_name() == Some("ottava-train")).unwrap();
        let text = String::from_utf8(rendered(train, "ottava-train").unwrap()).unwrap();
        for part in [
            ".SH EXAMPLES\n.nf\n  ottava train configs/quickstart.toml\n",
            ".SH EXIT STATUS\n",
            "\\fB75\\fR",
            ".SH ENVIRONMENT",
            "\\fBOTTAVA_CACHE_DIR\\fR",
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(!text.contains(".SH EXTRA"), "{text}");
    }

    #[test]
    fn the_exit_codes_are_those_of_the_documentation() {
        let page = include_str!("../../../../docs/reliability.md");
        let table = page.split("## Exit codes").nth(1).unwrap().split("\n## ").next().unwrap();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
        let documented: Vec<&str> =
            rows.flat_map(|(codes, _)| codes.split(", ")).filter(|code| *code != "code").collect();
        assert_eq!(documented, EXIT_CODES.map(|(code, _)| code));
    }
}
