//! The TOML file of a task.

use crate::exact_match::ExactMatchConfig;
use crate::filter::FilterConfig;
use crate::kind::TaskType;
use crate::metric::MetricName;
use ottava_common::{Error, Result, input};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The maximum size of the file of a task in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The keys of lm-evaluation-harness that have another name here.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("task", "name"),
    ("dataset_path", "data"),
    ("test_split", "data"),
    ("output_type", "type"),
    ("doc_to_text", "prompt"),
    ("doc_to_choice", "choices"),
    ("doc_to_target", "answer"),
    ("fewshot_split", "fewshot_data"),
    ("fewshot_delimiter", "fewshot_separator"),
    ("metric_list", "metrics"),
    ("filter_list", "[filter]"),
    ("generation_kwargs", "[generation]"),
];

/// The settings of a task.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskConfig {
    /// The name of the task in tables and metrics: letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// The items: a file with a JSON object on each line. Relative paths are relative to the folder of the task's file.
    pub data: PathBuf,
    /// What a model computes for an item.
    #[serde(rename = "type")]
    pub kind: TaskType,
    /// The prompt: the name of a field of the items, or a Jinja template over the fields. For all types except loglikelihood_rolling.
    #[serde(default)]
    pub prompt: Option<String>,
    /// The choices of multiple_choice: a list of templates, or a field that has a list, or a template that renders one.
    #[serde(default)]
    pub choices: Option<Choices>,
    /// The right answer, as a field or a template. For multiple_choice the index of a choice from 0, or its text; for generate_until the text; for
    /// loglikelihood_rolling the text that is scored. A list has several right answers.
    pub answer: String,
    /// The number of examples before each prompt.
    #[serde(default)]
    pub num_fewshot: usize,
    /// The examples, in the format of `data`; the first `num_fewshot` of them are used.
    #[serde(default)]
    pub fewshot_data: Option<PathBuf>,
    /// The text between examples.
    #[serde(default = "blank_line")]
    pub fewshot_separator: String,
    /// The text between a prompt and its answer.
    #[serde(default = "space")]
    pub target_delimiter: String,
    /// The metrics; by default the metrics of the type.
    #[serde(default)]
    pub metrics: Vec<MetricName>,
    /// The texts of generate_until.
    #[serde(default)]
    pub generation: Option<GenerationConfig>,
    /// The part of a generated text that is compared.
    #[serde(default)]
    pub filter: Option<FilterConfig>,
    /// The comparison of exact_match.
    #[serde(default)]
    pub exact_match: Option<ExactMatchConfig>,
}

/// The choices of an item.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Choices {
    /// A template for each choice.
    Each(Vec<String>),
    /// A field or a template for the list.
    All(String),
}

/// The `[generation]` table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerationConfig {
    /// The text ends before the first of these strings; by default before `fewshot_separator`. A text always ends at the tokenizer's end of text.
    #[serde(default)]
    pub until: Option<Vec<String>>,
    /// The maximum number of new tokens.
    #[serde(default = "max_gen_toks")]
    pub max_gen_toks: usize,
}

impl Default for GenerationConfig {
    fn default() -> GenerationConfig {
        GenerationConfig { until: None, max_gen_toks: max_gen_toks() }
    }
}

fn blank_line() -> String {
    "\n\n".into()
}

fn space() -> String {
    " ".into()
}

fn max_gen_toks() -> usize {
    256
}

impl TaskConfig {
    /// Reads the file of a task. Its paths become relative to the working directory.
    ///
    /// Errors with [`Error::Config`] if the file cannot be read, or has unknown keys or wrong values.
    pub fn read(path: &Path) -> Result<TaskConfig> {
        let wrong = |reason: String| Error::Config(format!("{}: {reason}", path.display()));
        let text = input::read_text(path, MAX_BYTES).map_err(|error| wrong(error.to_string()))?;
        let table: toml::Table = text.parse().map_err(|error| wrong(format!("this is not valid TOML: {error}")))?;
        for (theirs, ours) in OTHER_NAMES {
            if table.contains_key(*theirs) {
                return Err(wrong(format!("`{theirs}` of lm-evaluation-harness is `{ours}` here; rename it")));
            }
        }
        let config: TaskConfig = table.try_into().map_err(|error| wrong(error.to_string().trim_end().to_string()))?;
        if let Some(problem) = config.problem() {
            return Err(wrong(problem));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        Ok(TaskConfig {
            data: folder.join(&config.data),
            fewshot_data: config.fewshot_data.as_ref().map(|data| folder.join(data)),
            ..config
        })
    }

    /// Returns the metrics: the given ones, else the metrics of the type.
    pub fn metrics(&self) -> Vec<MetricName> {
        match (self.metrics.as_slice(), self.kind) {
            ([], TaskType::MultipleChoice) => vec![MetricName::Acc, MetricName::AccNorm],
            ([], TaskType::GenerateUntil) => vec![MetricName::ExactMatch],
            ([], TaskType::LoglikelihoodRolling) => {
                vec![MetricName::WordPerplexity, MetricName::BytePerplexity, MetricName::BitsPerByte]
            }
            (given, _) => given.to_vec(),
        }
    }

    /// Returns the strings that end a generated text.
    pub fn until(&self) -> Vec<String> {
        let given = self.generation.as_ref().and_then(|generation| generation.until.clone());
        given.unwrap_or_else(|| vec![self.fewshot_separator.clone()])
    }

    /// Returns the first problem of the values.
    fn problem(&self) -> Option<String> {
        let kind = self.kind.as_str();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if self.name.is_empty() || !self.name.chars().all(is_part) {
            return Some(format!("`name` is {:?}; write letters, digits, `_`, `-` and `.`", self.name));
        }
        let [chooses, generates] = [TaskType::MultipleChoice, TaskType::GenerateUntil].map(|of| of == self.kind);
        let keys = [
            ("prompt", self.prompt.is_some(), chooses || generates, true),
            ("choices", self.choices.is_some(), chooses, true),
            ("[generation]", self.generation.is_some(), generates, false),
            ("[filter]", self.filter.is_some(), generates, false),
            ("[exact_match]", self.exact_match.is_some(), generates, false),
            ("fewshot_data", self.fewshot_data.is_some(), self.num_fewshot > 0, self.num_fewshot > 0),
        ];
        for (key, is_set, is_read, is_needed) in keys {
            if is_set && !is_read {
                let reason = match key {
                    "fewshot_data" => "`num_fewshot` is 0".to_string(),
                    _ => format!("`type` is {kind}"),
                };
                return Some(format!("`{key}` is set, and {reason}; remove it"));
            }
            if is_needed && is_read && !is_set {
                return Some(format!("`{key}` is missing; a task of type {kind} needs it"));
            }
        }
        if self.num_fewshot > 0 && self.kind == TaskType::LoglikelihoodRolling {
            return Some(format!("`num_fewshot` is set, and `type` is {kind}; remove it"));
        }
        if let Some(wrong) = self.metrics.iter().find(|metric| metric.kind() != self.kind) {
            let of_type = MetricName::ALL.iter().filter(|metric| metric.kind() == self.kind);
            let names: Vec<_> = of_type.map(|metric| metric.as_str()).collect();
            return Some(format!(
                "`metrics` has {}, and a task of type {kind} has {}",
                wrong.as_str(),
                names.join(", ")
            ));
        }
        let tokens = self.generation.as_ref().map_or(1, |generation| generation.max_gen_toks);
        (tokens == 0).then(|| "`generation.max_gen_toks` is 0; set it to 1 or more".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<TaskConfig> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("task.toml");
        std::fs::write(&path, text).unwrap();
        TaskConfig::read(&path)
    }

    const CHOICE: &str =
        "name = \"a\"\ndata = \"i.jsonl\"\ntype = \"multiple_choice\"\nprompt = \"p\"\nanswer = \"a\"\n";
    const TEXT: &str = "name = \"a\"\ndata = \"i.jsonl\"\ntype = \"generate_until\"\nprompt = \"p\"\nanswer = \"a\"\n";

    #[test]
    fn defaults_follow_the_type() {
        let choice = read(&format!("{CHOICE}choices = [\"x\", \"y\"]")).unwrap();
        assert_eq!(choice.metrics(), [MetricName::Acc, MetricName::AccNorm]);
        assert_eq!((choice.target_delimiter.as_str(), choice.fewshot_separator.as_str()), (" ", "\n\n"));
        let text = read(TEXT).unwrap();
        assert_eq!((text.metrics(), text.until()), (vec![MetricName::ExactMatch], vec!["\n\n".to_string()]));
        let until = read(&format!("{TEXT}[generation]\nuntil = []")).unwrap();
        assert_eq!((until.until(), until.generation.unwrap().max_gen_toks), (Vec::new(), 256));
    }

    #[test]
    fn mistakes_name_the_key_and_the_remedy() {
        for (text, part) in [
            (format!("{CHOICE}choices = [\"x\"]\nmetric = 1"), "unknown field `metric`"),
            (format!("{CHOICE}doc_to_choice = [\"x\"]"), "`doc_to_choice` of lm-evaluation-harness is `choices` here"),
            (CHOICE.into(), "`choices` is missing; a task of type multiple_choice needs it"),
            (format!("{TEXT}choices = [\"x\"]"), "`choices` is set, and `type` is generate_until; remove it"),
            (
                format!("{TEXT}metrics = [\"acc\"]"),
                "`metrics` has acc, and a task of type generate_until has exact_match",
            ),
            (format!("{TEXT}num_fewshot = 2"), "`fewshot_data` is missing"),
            (format!("{TEXT}fewshot_data = \"f\""), "`fewshot_data` is set, and `num_fewshot` is 0; remove it"),
            (format!("{TEXT}[generation]\nmax_gen_toks = 0"), "`generation.max_gen_toks` is 0"),
            (TEXT.replace("\"a\"\ndata", "\"a b\"\ndata"), "`name` is \"a b\""),
            (
                TEXT.replace("generate_until", "loglikelihood_rolling"),
                "`prompt` is set, and `type` is loglikelihood_rolling",
            ),
            ("name = ".into(), "not valid TOML"),
        ] {
            let error = read(&text).unwrap_err().to_string();
            assert!(error.contains("task.toml: ") && error.contains(part), "{error}");
        }
    }
}
