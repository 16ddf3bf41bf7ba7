//! Items with their prompts, choices and right answers.

use crate::config::{Choices, TaskConfig};
use crate::kind::TaskType;
use crate::literal;
use crate::metric::MetricName;
use crate::template::{Fields, Found, Source, text_of};
use ottava_common::{Error, Result, input, python_json};
use serde_json::{Value as Json, json};
use std::collections::BTreeSet;
use std::path::Path;

/// The maximum size of a file of items in bytes.
const MAX_BYTES: u64 = 4 << 30;

/// An item of a task.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Item {
    /// The fields of the item.
    pub(crate) fields: Fields,
    /// The examples and the prompt. Empty for loglikelihood_rolling.
    pub(crate) context: String,
    /// The choices; empty unless the type is multiple_choice.
    pub(crate) choices: Vec<String>,
    /// The right answers.
    pub(crate) gold: Gold,
}

/// The right answers of an item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Gold {
    /// The indices of right choices.
    Choices(Vec<usize>),
    /// Right texts, or for loglikelihood_rolling the one text that is scored.
    Texts(Vec<String>),
}

/// The templates of a task.
struct Sources {
    prompt: Option<Source>,
    choices: Option<ChoiceSources>,
    answer: Source,
    /// Whether a metric divides log-likelihoods by the lengths of choices.
    divides_by_length: bool,
}

enum ChoiceSources {
    Each(Vec<Source>),
    All(Source),
}

impl Sources {
    /// Parses the sources of a task whose items have these `fields`.
    fn parse(config: &TaskConfig, fields: &BTreeSet<&str>) -> Result<Sources> {
        let choices = match &config.choices {
            None => None,
            Some(Choices::Each(each)) => Some(ChoiceSources::Each(
                each.iter().map(|source| Source::template("choices", source)).collect::<Result<_>>()?,
            )),
            Some(Choices::All(source)) => Some(ChoiceSources::All(Source::parse("choices", source, fields)?)),
        };
        let prompt = config.prompt.as_deref().map(|source| Source::parse("prompt", source, fields)).transpose()?;
        let answer = Source::parse("answer", &config.answer, fields)?;
        let by_length = |metric: &MetricName| matches!(metric, MetricName::AccNorm | MetricName::AccBytes);
        Ok(Sources { prompt, choices, answer, divides_by_length: config.metrics().iter().any(by_length) })
    }

    /// Makes an item of `fields`. `examples` precede its prompt. Errors with the key and the reason.
    fn item(&self, kind: TaskType, fields: Fields, examples: &str) -> Result<Item, String> {
        let named = |key: &'static str| move |reason: String| format!("`{key}`: {reason}");
        let prompt = self.prompt.as_ref().map(|source| source.text(&fields)).transpose().map_err(named("prompt"))?;
        let choices = match &self.choices {
            None => Vec::new(),
            Some(ChoiceSources::Each(each)) => {
                each.iter().map(|source| source.text(&fields)).collect::<Result<_, _>>().map_err(named("choices"))?
            }
            Some(ChoiceSources::All(source)) => source.texts(&fields).map_err(named("choices"))?,
        };
        let answer = self.answer.find(&fields).map_err(named("answer"))?;
        if let Some(empty) = choices.iter().position(|choice| self.divides_by_length && choice.is_empty()) {
            return Err(format!(
                "`choices`: choice {empty} is empty, so its log-likelihood has no length; leave it out, or set `metrics` to [\"acc\"]"
            ));
        }
        let gold = match kind {
            TaskType::MultipleChoice => gold_choices(answer, &choices).map(Gold::Choices),
            TaskType::GenerateUntil => gold_texts(answer).map(Gold::Texts),
            TaskType::LoglikelihoodRolling => match answer {
                Found::Field(value) => text_of(value),
                Found::Rendered(text) => Ok(text),
            }
            .map(|text| Gold::Texts(vec![text])),
        };
        let gold = gold.map_err(named("answer"))?;
        Ok(Item { fields, context: examples.to_string() + &prompt.unwrap_or_default(), choices, gold })
    }
}

impl Item {
    /// Returns the first right answer as text, which an example shows.
    pub(crate) fn answer(&self) -> &str {
        match &self.gold {
            Gold::Choices(right) => &self.choices[right[0]],
            Gold::Texts(texts) => &texts[0],
        }
    }
}

/// Returns the indices of the right choices. A field is an index, the text of a choice, or a list of them; `false` is 0 and `true` is 1. A rendered text
/// of digits is an index, whatever the choices are, and a rendered list is a list, as in lm-evaluation-harness.
fn gold_choices(answer: Found, choices: &[String]) -> Result<Vec<usize>, String> {
    if choices.is_empty() {
        return Err("the item has no choices".into());
    }
    let answer = match answer {
        Found::Field(value) => value,
        Found::Rendered(text) => index_of(&text)
            .map(|index| json!(index))
            .or_else(|| literal::list(&text).map(Json::Array))
            .unwrap_or_else(|| json!(text)),
    };
    let index = |answer: &Json| {
        let index = match answer {
            Json::Number(number) => number.as_u64().map(|index| index as usize),
            Json::Bool(is_second) => Some(usize::from(*is_second)),
            Json::String(text) => choices.iter().position(|choice| choice == text),
            _ => None,
        };
        let missing = || format!("{answer} is neither one of the choices nor an index below {}", choices.len());
        index.filter(|index| *index < choices.len()).ok_or_else(missing)
    };
    match &answer {
        Json::Array(all) if all.is_empty() => Err("the list is empty".into()),
        Json::Array(all) => all.iter().map(index).collect(),
        one => index(one).map(|index| vec![index]),
    }
}

/// Returns the number that a text of ASCII digits is.
fn index_of(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Returns the right texts.
fn gold_texts(answer: Found) -> Result<Vec<String>, String> {
    let texts = match answer {
        Found::Field(Json::Array(all)) => all.into_iter().map(text_of).collect::<Result<Vec<_>, _>>()?,
        Found::Field(other) => vec![text_of(other)?],
        Found::Rendered(text) => match literal::list(&text) {
            Some(all) => all.into_iter().map(text_of).collect::<Result<Vec<_>, _>>()?,
            None => vec![text],
        },
    };
    if texts.is_empty() { Err("the list is empty".into()) } else { Ok(texts) }
}

/// Reads the items of a task, with their prompts.
///
/// Errors with [`Error::Config`] for a source that is no template, and with [`Error::Data`] for a line that makes no item.
pub(crate) fn items(config: &TaskConfig) -> Result<Vec<Item>> {
    let all = read(&config.data)?;
    if all.is_empty() {
        return Err(Error::Data(format!("{}: the file has no items", config.data.display())));
    }
    let names = all.iter().flat_map(|(_, fields)| fields.keys().map(String::as_str)).collect();
    let sources = Sources::parse(config, &names)?;
    let examples = match &config.fewshot_data {
        Some(path) => Examples::read(path, config, &sources)?,
        None => Examples::default(),
    };
    let item = |(line, fields): (usize, Fields)| {
        let before = examples.before(&fields);
        sources.item(config.kind, fields, &before).map_err(wrong(&config.data, line))
    };
    all.into_iter().map(item).collect()
}

/// The examples before prompts.
#[derive(Default)]
struct Examples {
    /// The fields and the text of each example. If the examples are items, there is one more than a prompt has.
    all: Vec<(Fields, String)>,
    /// The number of examples before a prompt.
    count: usize,
    /// Whether the examples are items. Then no item is an example before its own prompt.
    are_items: bool,
}

impl Examples {
    fn read(path: &Path, config: &TaskConfig, sources: &Sources) -> Result<Examples> {
        let (all, count) = (read(path)?, config.num_fewshot);
        let are_items = is_same_file(path, &config.data);
        let needed = count + usize::from(are_items);
        if all.len() < needed {
            let why = if are_items { ", and no item is an example of its own prompt" } else { "" };
            return Err(Error::Data(format!(
                "{}: the file has {} examples, and `num_fewshot` is {count}{why}; lower it",
                path.display(),
                all.len()
            )));
        }
        let text = |(line, fields): (usize, Fields)| {
            let item = sources.item(config.kind, fields, "").map_err(wrong(path, line))?;
            // An empty answer ends the example at its prompt, as in lm-evaluation-harness.
            let answer = match item.answer() {
                "" => String::new(),
                answer => config.target_delimiter.clone() + answer + &config.fewshot_separator,
            };
            let text = item.context + &answer;
            Ok((item.fields, text))
        };
        Ok(Examples { all: all.into_iter().take(needed).map(text).collect::<Result<_>>()?, count, are_items })
    }

    /// Returns the examples before the prompt of an item.
    fn before(&self, item: &Fields) -> String {
        let others = self.all.iter().filter(|(fields, _)| !(self.are_items && fields == item));
        others.take(self.count).map(|(_, text)| text.as_str()).collect()
    }
}

/// Whether two paths are of one file.
fn is_same_file(left: &Path, right: &Path) -> bool {
    let [left, right] = [left, right].map(|path| path.canonicalize().ok());
    left.is_some() && left == right
}

fn wrong(path: &Path, line: usize) -> impl Fn(String) -> Error {
    move |reason| Error::Data(format!("{}, line {line}: {reason}", path.display()))
}

/// Reads the objects of a JSON lines file, each with the number of its line. Empty lines are skipped.
fn read(path: &Path) -> Result<Vec<(usize, Fields)>> {
    let text =
        input::read_text(path, MAX_BYTES).map_err(|error| Error::Data(format!("{}: {error}", path.display())))?;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let object = |(number, line): (usize, &str)| match python_json::parse(line) {
        Ok(Json::Object(fields)) => Ok((number, fields)),
        Ok(_) => Err(wrong(path, number)("an item is a JSON object".into())),
        Err(error) => Err(wrong(path, number)(format!("this is not JSON: {error}"))),
    };
    lines.map(object).collect()
}
