//! One flag for each sampling parameter.

use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches, value_parser};
use ottava_engine::{Field, Parameter, Sampling};

/// The sampling parameters, each set by a flag of [`Parameter::ALL`].
pub struct SamplingFlags(pub Sampling);

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
        let mut flags = SamplingFlags(Sampling::default());
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for Parameter { name, field, .. } in Parameter::ALL {
            match field {
                Field::Number(field, _) => {
                    let field = field(&mut self.0);
                    *field = matches.get_one(name).copied().unwrap_or(*field);
                }
                Field::Tokens(field) => {
                    let field = field(&mut self.0);
                    *field = matches.get_one(name).copied().or(*field);
                }
            }
        }
        Ok(())
    }
}
