//! The settings of rewards.

use crate::external::{CommandConfig, HttpConfig, JudgeConfig};
use crate::reward::Reward;
use crate::rules::{
    EnvironmentRewardConfig, ExactConfig, FormatConfig, LengthConfig, MathConfig, ModelConfig, ModelScore,
    NumberConfig, OverlongConfig, RegexConfig, RepetitionConfig,
};
use crate::weighted::{Part, Rewards};
use ottava_common::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A reward: its type with the settings of the type, its name and its weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RewardSpec {
    /// The name in metrics and errors; empty is the type.
    #[serde(default)]
    pub name: String,
    /// The factor of the reward in the sum of all rewards.
    #[serde(default = "one")]
    pub weight: f64,
    /// The type and its settings.
    #[serde(flatten)]
    pub kind: RewardKind,
}

fn one() -> f64 {
    1.0
}

/// The types of rewards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RewardKind {
    /// The right answer, letter by letter.
    Exact(ExactConfig),
    /// The right number.
    Number(NumberConfig),
    /// An answer that is mathematically equal to the right answer.
    Math(MathConfig),
    /// A regular expression.
    Regex(RegexConfig),
    /// Tags in their order.
    Format(FormatConfig),
    /// DAPO's soft punishment of long completions.
    Overlong(OverlongConfig),
    /// The distance from a target length.
    Length(LengthConfig),
    /// The share of repeated n-grams.
    Repetition(RepetitionConfig),
    /// The rewards that the environment returned.
    Environment(EnvironmentRewardConfig),
    /// A reward model, which runs beside the trained model.
    Model(ModelConfig),
    /// A program that answers JSON lines.
    Command(CommandConfig),
    /// A server that answers JSON.
    Http(HttpConfig),
    /// A language model behind OpenAI's API.
    Judge(JudgeConfig),
}

impl RewardSpec {
    /// Makes all rewards ready: starts commands, reads keys and compiles patterns. Opens no connection and no reward model.
    ///
    /// Errors with [`Error::Config`] and the name of the reward if its settings cannot work, if two rewards have the same name, or there is none.
    pub fn build(specs: &[RewardSpec]) -> Result<Rewards> {
        if specs.is_empty() {
            return Err(Error::Config("there is no reward; add one".into()));
        }
        let mut parts: Vec<Part> = Vec::new();
        for spec in specs {
            let name = spec.name();
            let refusal = |words: &str| Error::Config(format!("reward `{name}`: {words}"));
            if name.contains(|c: char| c == '/' || c.is_control()) {
                return Err(refusal("the name has a slash or a control character, which names of metrics cannot have"));
            }
            if parts.iter().any(|part| part.name == name) {
                return Err(refusal("another reward has this name; set `name`"));
            }
            if !spec.weight.is_finite() {
                return Err(refusal("`weight` is no finite number"));
            }
            let number = RewardSpec::models(&specs[..parts.len()]).count();
            let reward = spec.kind.reward(name, number).map_err(|error| refusal(&error.to_string()))?;
            parts.push(Part { name: name.to_string(), weight: spec.weight, reward });
        }
        Ok(Rewards::new(parts))
    }

    /// The reward models among `specs` with their names, in order.
    pub fn models(specs: &[RewardSpec]) -> impl Iterator<Item = (&str, &ModelConfig)> {
        specs.iter().filter_map(|spec| match &spec.kind {
            RewardKind::Model(config) => Some((spec.name(), config)),
            _ => None,
        })
    }

    /// The name in metrics and errors.
    pub fn name(&self) -> &str {
        match (self.name.as_str(), &self.kind) {
            ("", RewardKind::Exact(_)) => "exact",
            ("", RewardKind::Number(_)) => "number",
            ("", RewardKind::Math(_)) => "math",
            ("", RewardKind::Regex(_)) => "regex",
            ("", RewardKind::Format(_)) => "format",
            ("", RewardKind::Overlong(_)) => "overlong",
            ("", RewardKind::Length(_)) => "length",
            ("", RewardKind::Repetition(_)) => "repetition",
            ("", RewardKind::Environment(_)) => "environment",
            ("", RewardKind::Model(_)) => "model",
            ("", RewardKind::Command(_)) => "command",
            ("", RewardKind::Http(_)) => "http",
            ("", RewardKind::Judge(_)) => "judge",
            (name, _) => name,
        }
    }
}

impl RewardKind {
    /// `number` counts the reward models before this reward.
    fn reward(&self, name: &str, number: usize) -> Result<Box<dyn Reward>> {
        Ok(match self {
            RewardKind::Exact(config) => Box::new(config.clone()),
            RewardKind::Number(config) => Box::new(config.clone()),
            RewardKind::Math(config) => Box::new(config.clone()),
            RewardKind::Regex(config) => Box::new(config.rule()?),
            RewardKind::Format(config) => Box::new(config.rule()?),
            RewardKind::Overlong(config) => Box::new(config.rule()?),
            RewardKind::Length(config) => Box::new(config.rule()?),
            RewardKind::Repetition(config) => Box::new(config.rule()?),
            RewardKind::Environment(config) => Box::new(config.clone()),
            RewardKind::Model(_) => Box::new(ModelScore { number }),
            RewardKind::Command(config) => Box::new(config.start(name)?),
            RewardKind::Http(config) => Box::new(config.reward()?),
            RewardKind::Judge(config) => Box::new(config.reward()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(settings: &[&str]) -> String {
        let specs: Vec<RewardSpec> = settings.iter().map(|text| toml::from_str(text).unwrap()).collect();
        RewardSpec::build(&specs).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn settings_are_read_and_written_again() {
        let text = "type = 'math'\nname = 'accuracy'\nweight = 2.0\nunits = ['apples']\nextract = 'after:####'";
        let spec: RewardSpec = toml::from_str(text).unwrap();
        assert_eq!((spec.name.as_str(), spec.weight), ("accuracy", 2.0));
        assert_eq!(toml::from_str::<RewardSpec>(&toml::to_string(&spec).unwrap()).unwrap(), spec);
        assert!(serde_json::to_string(&schemars::schema_for!(RewardSpec)).unwrap().contains("mathematically equal"));
    }

    #[test]
    fn settings_of_the_documentation_are_settings() {
        let page = include_str!("../../../docs/rewards.md");
        let blocks: Vec<_> = page.split("```toml\n").skip(1).map(|part| part.split("```").next().unwrap()).collect();
        assert_eq!(blocks.len(), 13, "one for each type");
        for block in blocks {
            let table: toml::Table = block.parse().unwrap();
            let reward = table["reinforcement"]["rewards"][0].clone();
            reward.try_into::<RewardSpec>().unwrap_or_else(|error| panic!("{block}: {error}"));
        }
    }

    #[test]
    fn unknown_settings_are_errors() {
        for (text, words) in [
            ("type = 'math'\nextarct = 'boxed'", "extarct"),
            ("type = 'math'\nextract = 'last'", "\"after:MARKER\""),
            ("type = 'regexp'", "regexp"),
            ("weight = 1.0", "type"),
            ("type = 'command'\ncommand = ['a']\non_error = 'ignore'", "ignore"),
        ] {
            let error = toml::from_str::<RewardSpec>(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn settings_that_cannot_work_name_the_reward() {
        for (settings, words) in [
            (&[][..], "there is no reward"),
            (&["type = 'math'", "type = 'math'"], "reward `math`: another reward has this name"),
            (&["type = 'math'\nname = 'a/b'"], "slash"),
            (&["type = 'math'\nweight = nan"], "`weight`"),
            (&["type = 'regex'\npattern = 'a)('"], "reward `regex`: `pattern` is no regular expression"),
            (&["type = 'regex'\npattern = '(?:a{999}){999}'"], "`pattern`"),
            (&["type = 'format'\ntags = []"], "`tags`"),
            (&["type = 'overlong'\nmax_length = 4\nbuffer = 5"], "`buffer`"),
            (&["type = 'length'\ntarget = 4\ndistance = 0"], "`distance`"),
            (&["type = 'repetition'\nngram = 0"], "`ngram`"),
            (&["type = 'command'\ncommand = []"], "`command` is empty"),
            (&["type = 'command'\ncommand = ['/no/such/program']"], "`/no/such/program` cannot be started"),
            (&["type = 'command'\ncommand = ['cat']\ntimeout = 0.0"], "`timeout` is 0"),
            (&["type = 'command'\ncommand = ['cat']\nprocesses = 0"], "`processes` is 0"),
            (&["type = 'http'\nurl = 'localhost:80'"], "`url` is no address"),
            (&["type = 'http'\nurl = 'http://localhost'\napi_key_env = 'sk-abc'"], "Write no key into settings"),
            (&["type = 'judge'\nurl = 'http://localhost'\nmodel = 'm'\ntemplate = '{prompt'"], "`template`"),
            (
                &["type = 'judge'\nurl = 'http://localhost'\nmodel = 'm'\ntemplate = ''\nscore_pattern = 'a'"],
                "one group",
            ),
        ] {
            let error = error(settings);
            assert!(error.contains(words) && !error.contains("sk-abc"), "{settings:?}: {error}");
        }
    }
}
