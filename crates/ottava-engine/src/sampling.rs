//! The sampling parameters of a request, and the table of these parameters.

use ottava_common::error::{Error, Result};
use ottava_tensor::ops::Draw;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The sampling of a request's tokens. The default is greedy: the most likely token is always taken, without penalties.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// The divisor of the logits; 0 always takes the most likely token.
    pub temperature: f64,
    /// The number of most likely tokens that can be drawn; `None` for all tokens.
    pub top_k: Option<usize>,
    /// The cumulative probability of the most likely tokens that can be drawn; 1 for all tokens.
    pub top_p: f64,
    /// The minimum probability of tokens that can be drawn, relative to the probability of the likeliest token (0.1: at least a tenth of it); 0 for
    /// all tokens.
    pub min_p: f64,
    /// The factor of the repetition penalty; 1 for no penalty. For tokens in the prompt or the output, a positive logit is divided by it, and a
    /// negative logit is multiplied by it (Keskar et al. 2019, arXiv:1909.05858).
    pub repetition_penalty: f64,
    /// The number that is subtracted from the logits of tokens in the output.
    pub presence_penalty: f64,
    /// The number that is subtracted from the logit of a token for each of its occurrences in the output.
    pub frequency_penalty: f64,
    /// The numbers that are added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The seed of the draws. Draws do not depend on other requests.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// Returns the sampling from the unmodified distribution, the default of APIs.
    pub fn unchanged() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    /// Returns whether the most likely token by the unmodified logits is taken: the temperature is 0, and no parameter changes a logit.
    pub(crate) fn is_plain(&self) -> bool {
        let Draw { temperature, repetition_penalty, presence_penalty, frequency_penalty, .. } = self.draw();
        let changes_none = [repetition_penalty, presence_penalty, frequency_penalty] == [1.0, 0.0, 0.0];
        temperature == 0.0 && changes_none && self.logit_bias.is_empty()
    }

    /// Returns whether draws depend on the numbers of earlier tokens: some penalty applies.
    pub(crate) fn counts_tokens(&self) -> bool {
        [self.repetition_penalty, self.presence_penalty, self.frequency_penalty] != [1.0, 0.0, 0.0]
    }

    /// Returns these parameters in the form of the op `sample`, without adjustments of single tokens.
    pub(crate) fn draw(&self) -> Draw {
        Draw {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty as f32,
            presence_penalty: self.presence_penalty as f32,
            frequency_penalty: self.frequency_penalty as f32,
            ..Draw::GREEDY
        }
    }

    /// Returns the first field with an unusable value, and the reason.
    pub fn problem(&self) -> Option<(&'static str, String)> {
        // The table reads fields by references that can write, so it gets a copy, without the list of biases.
        let mut copy = Sampling { logit_bias: Vec::new(), ..*self };
        let of_table =
            Parameter::ALL.iter().find_map(|parameter| Some((parameter.name, parameter.problem(&mut copy)?)));
        of_table.or_else(|| {
            let (token, bias) = self.logit_bias.iter().find(|(_, bias)| !bias.is_finite())?;
            Some(("logit_bias", format!("the bias of token {token} is {bias}; it is a number")))
        })
    }

    /// Errors with [`Error::Config`] for a value that cannot be used.
    pub fn check(&self) -> Result<()> {
        self.problem().map_or(Ok(()), |(_, text)| Err(Error::Config(text)))
    }
}

/// A numeric parameter of [`Sampling`]. Commands have a flag for each parameter, requests to the server have a field, and `generation_config.json` of
/// a model folder can suggest a value.
pub struct Parameter {
    /// The name of the field, as in vLLM. A command's flag has hyphens instead of underscores.
    pub name: &'static str,
    /// The field of [`Sampling`].
    pub field: Field,
    /// Whether `generation_config.json` suggests a value. If not, its key is not read, as in vLLM.
    pub is_suggested: bool,
    /// The description of a command's flag.
    pub help: &'static str,
}

/// A field that a [`Parameter`] sets.
#[derive(Clone, Copy)]
pub enum Field {
    /// A number, and the range of its valid values.
    Number(fn(&mut Sampling) -> &mut f64, Range),
    /// A number of tokens from 1 up; `None` for all tokens. In files and requests, 0 and -1 mean all tokens, as in vLLM.
    Tokens(fn(&mut Sampling) -> &mut Option<usize>),
}

/// A range of valid numbers. Infinities and NaN are in no range.
#[derive(Clone, Copy)]
pub enum Range {
    /// Numbers from this number up.
    From(f64),
    /// Numbers above this number.
    Above(f64),
    /// Numbers above the first number, up to the second.
    AboveTo(f64, f64),
    /// Numbers from the first number to the second.
    FromTo(f64, f64),
}

impl Range {
    fn contains(self, value: f64) -> bool {
        let is_inside = match self {
            Range::From(least) => value >= least,
            Range::Above(least) => value > least,
            Range::AboveTo(least, most) => value > least && value <= most,
            Range::FromTo(least, most) => value >= least && value <= most,
        };
        value.is_finite() && is_inside
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Range::From(least) => write!(f, "a number from {least} up"),
            Range::Above(least) => write!(f, "a number above {least}"),
            Range::AboveTo(least, most) => write!(f, "a number above {least}, and at most {most}"),
            Range::FromTo(least, most) => write!(f, "a number from {least} to {most}"),
        }
    }
}

impl Parameter {
    /// All parameters, in the order of a command's help.
    pub const ALL: &[Parameter] = &[
        Parameter {
            name: "temperature",
            field: Field::Number(|sampling| &mut sampling.temperature, Range::From(0.0)),
            is_suggested: true,
            help: "Sampling temperature; 0 always takes the most likely token",
        },
        Parameter {
            name: "top_k",
            field: Field::Tokens(|sampling| &mut sampling.top_k),
            is_suggested: true,
            help: "Sample only from this number of tokens, the most likely ones",
        },
        Parameter {
            name: "top_p",
            field: Field::Number(|sampling| &mut sampling.top_p, Range::AboveTo(0.0, 1.0)),
            is_suggested: true,
            help: "Sample only from the most likely tokens that together have this probability (0.9: the smallest set of tokens with 90 %)",
        },
        Parameter {
            name: "min_p",
            field: Field::Number(|sampling| &mut sampling.min_p, Range::FromTo(0.0, 1.0)),
            is_suggested: true,
            help: "Leave out unlikely tokens: sample only tokens whose probability is at least this share of the most likely token's probability (0.1: at least a tenth)",
        },
        Parameter {
            name: "repetition_penalty",
            field: Field::Number(|sampling| &mut sampling.repetition_penalty, Range::Above(0.0)),
            is_suggested: true,
            help: "Make repetition less likely: divide positive logits of tokens in prompt and completion by this number, and multiply negative logits by it",
        },
        Parameter {
            name: "presence_penalty",
            field: Field::Number(|sampling| &mut sampling.presence_penalty, Range::FromTo(-100.0, 100.0)),
            is_suggested: false,
            help: "Subtract this number from the logit of each token that the completion contains",
        },
        Parameter {
            name: "frequency_penalty",
            field: Field::Number(|sampling| &mut sampling.frequency_penalty, Range::FromTo(-100.0, 100.0)),
            is_suggested: false,
            help: "Subtract this number from the logit of a token once for each occurrence in the completion",
        },
    ];

    /// Returns the reason why the value in `sampling` cannot be used; `None` if it can be used.
    fn problem(&self, sampling: &mut Sampling) -> Option<String> {
        let name = self.name;
        match self.field {
            Field::Number(field, range) => {
                let value = *field(sampling);
                (!range.contains(value)).then(|| format!("`{name}` is {value}; it is {range}"))
            }
            Field::Tokens(field) => {
                let is_none = *field(sampling) == Some(0);
                is_none.then(|| format!("`{name}` is 0; it is a number of tokens from 1 up, or left out"))
            }
        }
    }
}

/// Converts a number of tokens from a file or a request. Numbers below 1 mean all tokens, as in vLLM.
pub fn tokens(count: i64) -> Option<usize> {
    usize::try_from(count).ok().filter(|&count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_be_used_are_errors() {
        Sampling::default().check().unwrap();
        let default = Sampling::default;
        for (wrong, name) in [
            (Sampling { temperature: -1.0, ..default() }, "`temperature` is -1"),
            (Sampling { temperature: f64::NAN, ..default() }, "`temperature` is NaN"),
            (Sampling { top_k: Some(0), ..default() }, "`top_k` is 0"),
            (Sampling { top_p: 0.0, ..default() }, "`top_p` is 0; it is a number above 0, and at most 1"),
            (Sampling { min_p: 1.5, ..default() }, "`min_p` is 1.5; it is a number from 0 to 1"),
            (Sampling { repetition_penalty: 0.0, ..default() }, "`repetition_penalty` is 0"),
            (Sampling { presence_penalty: f64::NAN, ..default() }, "`presence_penalty` is NaN"),
            (Sampling { frequency_penalty: f64::INFINITY, ..default() }, "`frequency_penalty` is inf"),
            (Sampling { logit_bias: vec![(3, f32::NAN)], ..default() }, "the bias of token 3 is NaN"),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }

    #[test]
    fn only_settings_that_change_logits_need_a_draw() {
        let default = Sampling::default;
        for plain in [default(), Sampling { seed: 3, top_k: Some(2), top_p: 0.5, min_p: 0.5, ..default() }] {
            assert!(plain.is_plain(), "{plain:?}");
        }
        for changing in [
            Sampling { temperature: 1e-3, ..default() },
            Sampling { repetition_penalty: 1.01, ..default() },
            Sampling { presence_penalty: -1.0, ..default() },
            Sampling { frequency_penalty: 0.1, ..default() },
            Sampling { logit_bias: vec![(0, 1.0)], ..default() },
        ] {
            assert!(!changing.is_plain(), "{changing:?}");
        }
    }

    #[test]
    fn each_parameter_of_the_table_is_a_field_of_its_name() {
        for parameter in Parameter::ALL {
            let mut sampling = Sampling::default();
            match parameter.field {
                Field::Number(field, _) => *field(&mut sampling) += 0.25,
                Field::Tokens(field) => *field(&mut sampling) = Some(2),
            }
            let (of_default, changed) =
                (serde_json::to_value(Sampling::default()).unwrap(), serde_json::to_value(sampling).unwrap());
            let differing: Vec<_> =
                of_default.as_object().unwrap().iter().filter(|(name, value)| changed[*name] != **value).collect();
            assert_eq!(differing.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), [parameter.name]);
        }
    }
}
