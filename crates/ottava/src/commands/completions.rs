//! `ottava completions`.

use clap::{Args, Command};
use clap_complete::Shell;
use ottava_common::Result;

/// Print the completions of commands and options for a shell.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava completions bash > ~/.local/share/bash-completion/completions/ottava
  ottava completions zsh > ~/.zfunc/_ottava
  ottava completions fish > ~/.config/fish/completions/ottava.fish")]
pub struct Completions {
    /// The shell.
    shell: Shell,
}

impl Completions {
    /// Prints the shell completions of `program`.
    pub fn run(self, mut program: Command) -> Result<()> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut program, "ottava", &mut text);
        out_part!("{}", String::from_utf8_lossy(&text));
        Ok(())
    }
}
