//! `ottava completions`.

use clap::builder::PossibleValuesParser;
use clap::{Args, Command};
use clap_complete::Shell;
use ottava_common::Result;
use ottava_recipe::RecipeName;
use ottava_recipe::storage::Storage;
use ottava_settings::key_paths;
use ottava_tensor::cuda::GpuModel;

/// Print the completions of commands, options and values for a shell.
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
    pub fn run(self, program: Command) -> Result<()> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut with_values(program, &values()), "ottava", &mut text);
        out_part!("{}", String::from_utf8_lossy(&text));
        Ok(())
    }
}

/// The known values of options, by the names of the options. The program itself parses them with other parsers, whose errors say more.
fn values() -> Vec<(&'static str, Vec<String>)> {
    let texts = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    vec![
        ("recipe", RecipeName::ALL.iter().map(|recipe| recipe.as_str().to_string()).collect()),
        ("storage", Storage::ALL.iter().map(|storage| storage.as_str().to_string()).collect()),
        ("device", texts(&["auto", "cuda", "cpu"])),
        ("kv-cache-dtype", texts(&["auto", "bfloat16", "fp8"])),
        // Shells separate values at spaces, and `plan` reads a hyphen as a space.
        ("gpu", GpuModel::names().iter().map(|name| name.replace(' ', "-")).collect()),
        ("set", key_paths().map(|key| format!("{key}=")).collect()),
    ]
}

/// Returns `command` with the `values` of its options, and of the options of the commands below it.
fn with_values(command: Command, values: &[(&'static str, Vec<String>)]) -> Command {
    let ids: Vec<_> = command
        .get_arguments()
        .filter_map(|arg| {
            let (_, known) = values.iter().find(|(name, _)| arg.get_long() == Some(name))?;
            Some((arg.get_id().clone(), known.clone()))
        })
        .collect();
    let command = ids.into_iter().fold(command, |command, (id, known)| {
        command.mut_arg(id, |arg| arg.value_parser(PossibleValuesParser::new(known)))
    });
    command.mut_subcommands(|inner| with_values(inner, values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::{CommandFactory, Parser};

    #[test]
    fn values_of_options_are_completed() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut with_values(Cli::command(), &values()), "ottava", &mut text);
            let text = String::from_utf8(text).unwrap();
            for value in ["fp8-delayed", "msamp-o2", "RTX-4090", "optimizer.learning_rate="] {
                assert!(text.contains(value), "{shell}: no {value}");
            }
        }
    }

    #[test]
    fn completed_values_are_ones_that_commands_take() {
        for (name, known) in values().into_iter().filter(|(name, _)| *name != "set") {
            let command: &[&str] = if name == "kv-cache-dtype" { &["serve", "model"] } else { &["plan", "run.toml"] };
            for value in known {
                let option = format!("--{name}={value}");
                Cli::try_parse_from([&["ottava"], command, &[option.as_str()]].concat()).unwrap();
            }
        }
        for gpu in GpuModel::names() {
            assert_eq!(GpuModel::named(&gpu.replace(' ', "-")).unwrap(), GpuModel::named(gpu).unwrap());
        }
    }
}
