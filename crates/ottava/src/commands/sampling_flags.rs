//! One flag for each sampling parameter.

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches, ValueEnum, value_parser};
use ottava_common::Result;
use ottava_engine::{Field, Parameter, Sampling};
use std::path::Path;

/// The sampling parameters, each set by a flag of [`Parameter::ALL`].
pub struct SamplingFlags {
    sampling: Sampling,
    /// The names of the parameters on the command line.
    given: Vec<&'static str>,
}

/// Where the sampling settings come from that the command line or a request leaves out.
#[derive(Clone, Copy, ValueEnum)]
pub enum GenerationConfig {
    Auto,
    None,
}

impl GenerationConfig {
    /// Returns the sampling that the folder of a model suggests; `None` if it suggests none, or if its file is ignored.
    pub fn suggested(self, folder: &Path) -> Result<Option<Sampling>> {
        match self {
            GenerationConfig::Auto => Sampling::of_folder(folder),
            GenerationConfig::None => Ok(None),
        }
    }

    /// Like [`GenerationConfig::suggested`], for `ottava chat`: with the temperature 0 unless the file says that tokens are drawn.
    pub fn suggested_for_chat(self, folder: &Path) -> Result<Option<Sampling>> {
        match self {
            GenerationConfig::Auto => Sampling::of_chat(folder),
            GenerationConfig::None => Ok(None),
        }
    }
}

impl SamplingFlags {
    /// Returns the sampling.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Takes the parameters that are not on the command line from `base`.
    pub fn start_from(&mut self, mut base: Sampling) {
        for Parameter { field, .. } in Parameter::ALL.iter().filter(|parameter| self.given.contains(&parameter.name)) {
            match field {
                Field::Number(field, _) => *field(&mut base) = *field(&mut self.sampling),
                Field::Tokens(field) => *field(&mut base) = *field(&mut self.sampling),
            }
        }
        self.sampling = base;
    }
}

fn flag(parameter: &Parameter) -> Arg {
    let name = parameter.name;
    let arg = Arg::new(name).long(name.replace('_', "-")).value_name(name.to_uppercase()).help(parameter.help);
    let arg = arg.allow_negative_numbers(true);
    match parameter.field {
        Field::Number(field, _) => {
            let default = field(&mut Sampling::default()).to_string();
            arg.value_parser(value_parser!(f64)).default_value(default)
        }
        Field::Tokens(_) => arg.value_parser(value_parser!(usize)),
    }
}

impl Args for SamplingFlags {
    fn augment_args(command: Command) -> Command {
        command.args(Parameter::ALL.iter().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SamplingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<SamplingFlags, Error> {
        let mut flags = SamplingFlags { sampling: Sampling::default(), given: Vec::new() };
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for Parameter { name, field, .. } in Parameter::ALL {
            if matches.value_source(name) == Some(ValueSource::CommandLine) {
                self.given.push(name);
            }
            match field {
                Field::Number(field, _) => {
                    let field = field(&mut self.sampling);
                    *field = matches.get_one(name).copied().unwrap_or(*field);
                }
                Field::Tokens(field) => {
                    let field = field(&mut self.sampling);
                    *field = matches.get_one(name).copied().or(*field);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_come_before_what_a_model_suggests() {
        let command = SamplingFlags::augment_args(Command::new("chat"));
        let matches = command.try_get_matches_from(["chat", "--temperature", "0", "--top-k", "3"]).unwrap();
        let mut flags = SamplingFlags::from_arg_matches(&matches).unwrap();
        flags.start_from(Sampling { temperature: 0.6, top_p: 0.9, top_k: Some(20), ..Sampling::unchanged() });
        let expected = Sampling { temperature: 0.0, top_p: 0.9, top_k: Some(3), ..Sampling::unchanged() };
        assert_eq!(flags.sampling(), &expected);
    }
}
