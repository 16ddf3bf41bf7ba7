//! `ottava config`: the files of runs.

use clap::{Args, Subcommand};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::{Error, Result};
use ottava_settings::{migrate, reference};
use std::path::PathBuf;

/// Print a run's TOML file with current keys, or print every key.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava config migrate run.toml
  ottava config migrate run.toml --in-place
  ottava config reference")]
pub struct ConfigCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Migrate(Migrate),
    Reference(Reference),
}

/// Print a run's file with keys of earlier versions of Ottava replaced by the current keys and values. Comments are kept.
#[derive(Args)]
struct Migrate {
    /// The run's TOML file.
    file: PathBuf,
    /// Overwrite the file instead of printing the new text.
    #[arg(long)]
    in_place: bool,
}

/// Print every key at its default, with its meaning: configs/reference.toml.
#[derive(Args)]
struct Reference {}

impl ConfigCommand {
    pub fn run(self) -> Result<()> {
        match self.command {
            Command::Migrate(command) => command.run(),
            Command::Reference(Reference {}) => {
                out_part!("{}", reference());
                Ok(())
            }
        }
    }
}

impl Migrate {
    fn run(self) -> Result<()> {
        let path = &self.file;
        let text =
            std::fs::read_to_string(path).map_err(|error| Error::Config(format!("{}: {error}", path.display())))?;
        let migrated = migrate(path, &text)?;
        if !self.in_place {
            out_part!("{}", migrated.toml);
        } else if !migrated.changes.is_empty() {
            replace_file(&RealFs, path, migrated.toml.as_bytes())?;
        }
        migrated.changes.iter().for_each(|change| note!("{change}"));
        note!("{}: {} changes", path.display(), migrated.changes.len());
        Ok(())
    }
}
