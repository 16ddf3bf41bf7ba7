//! `ottava man`.

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

impl Man {
    /// Writes the manual pages of `program`.
    pub fn run(self, mut program: Command) -> Result<()> {
        program.build();
        create_dirs(&RealFs, &self.folder)?;
        let commands = program.get_subcommands().filter(|command| command.get_name() != "help");
        let pages: Vec<Command> = [&program].into_iter().chain(commands).cloned().collect();
        for page in &pages {
            let name = page.get_display_name().unwrap_or(page.get_name()).to_string();
            let path = self.folder.join(format!("{name}.1"));
            let mut text = Vec::new();
            clap_mangen::Man::new(page.clone()).title(&name).render(&mut text).map_err(Error::io(&path))?;
            replace_file(&RealFs, &path, &text)?;
        }
        out!("wrote {} pages to {}", pages.len(), self.folder.display());
        Ok(())
    }
}
