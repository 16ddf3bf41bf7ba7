//! The reward `judge`.

use super::failure::OnError;
use super::http::{Remote, attempts, concurrency, timeout};
use super::parallel::in_parallel;
use super::protocol::excerpt;
use super::template::Template;
use crate::deadline::Deadline;
use crate::reward::{Reward, Scores};
use crate::sample::Sample;
use ottava_common::{Error, Result};
use ottava_http::Url;
use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The last bytes of a judgement in which the score is looked for.
const MAX_JUDGEMENT: usize = 16 << 10;

/// A language model that judges completions, behind a server with OpenAI's API (`/chat/completions`): Ottava's own, vLLM, SGLang or a service. The
/// score is read from its text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JudgeConfig {
    /// The address of the API up to its version, as in "http://localhost:8000/v1".
    pub url: String,
    /// The name of the model.
    pub model: String,
    /// The name of an environment variable with the key of the API, which is sent as `Authorization: Bearer KEY`; empty sends none.
    #[serde(default)]
    pub api_key_env: String,
    /// The message to the judge. {prompt}, {completion} and {COLUMN} stand for the prompt, the completion and a column of the data; {{ and }} are
    /// braces. Messages of a prompt are paragraphs such as "user: …".
    pub template: String,
    /// The system message; empty sends none.
    #[serde(default)]
    pub system: String,
    /// A regular expression with one group, which matches the score: the last match counts.
    #[serde(default = "score_pattern")]
    pub score_pattern: String,
    /// The smallest and the largest score. A judgement with another score, or without one, is a failed attempt.
    #[serde(default = "score_range")]
    pub score_range: [f64; 2],
    /// Other keys of each request, such as the temperature.
    #[serde(default = "parameters")]
    pub parameters: Map<String, Value>,
    /// Requests at the same time.
    #[serde(default = "concurrency")]
    pub concurrency: usize,
    /// Seconds in which a request must be answered.
    #[serde(default = "timeout")]
    pub timeout: f64,
    /// Attempts for each completion. Statuses 408, 429 and 5xx, timeouts, lost connections and judgements without a score are tried again, after pauses
    /// that double from half a second.
    #[serde(default = "attempts")]
    pub attempts: u32,
    /// What happens to a completion after its last attempt: "stop" ends the run with the error, "zero" scores it 0, and "skip" does not score it.
    #[serde(default)]
    pub on_error: OnError,
}

fn score_pattern() -> String {
    r"(?i)score\W{0,10}?(-?\d+(?:\.\d+)?)".into()
}

fn score_range() -> [f64; 2] {
    [0.0, 10.0]
}

fn parameters() -> Map<String, Value> {
    Map::from_iter([("temperature".to_string(), json!(0.0)), ("max_tokens".to_string(), json!(1024))])
}

impl JudgeConfig {
    /// The reward. Errors with [`Error::Config`] if a setting is wrong, the key is not there, or connections are forbidden.
    pub(crate) fn reward(&self) -> Result<Judge> {
        let refuse = |words: String| Err(Error::Config(words));
        let url = Url::new("url", &self.url)?.join("chat/completions");
        let remote = Remote::new("url", url, &self.api_key_env, self.timeout, self.attempts)?;
        let pattern = match Regex::new(&self.score_pattern) {
            Ok(pattern) if pattern.captures_len() == 2 => pattern,
            Ok(_) => return refuse("`score_pattern` has to have exactly one group, which matches the score".into()),
            Err(error) => return refuse(format!("`score_pattern` is no regular expression: {error}")),
        };
        let [least, most] = self.score_range;
        if !(least.is_finite() && most.is_finite() && least < most) {
            return refuse(format!("`score_range` is [{least}, {most}]; the first number has to be smaller"));
        }
        if self.concurrency == 0 {
            return refuse("`concurrency` is 0; it has to be at least 1".into());
        }
        let template = Template::new(&self.template)?;
        Ok(Judge { config: self.clone(), remote, template, score: Score { pattern, least, most } })
    }

    /// The request with this message.
    fn request(&self, message: &str) -> Vec<u8> {
        let mut request = self.parameters.clone();
        let user = json!({ "role": "user", "content": message });
        let messages = match self.system.as_str() {
            "" => json!([user]),
            system => json!([{ "role": "system", "content": system }, user]),
        };
        request.insert("model".into(), json!(self.model));
        request.insert("messages".into(), messages);
        Value::from(request).to_string().into_bytes()
    }
}

/// The running reward.
pub(crate) struct Judge {
    config: JudgeConfig,
    remote: Remote,
    template: Template,
    score: Score,
}

/// How a score is read.
#[derive(Clone)]
struct Score {
    pattern: Regex,
    least: f64,
    most: f64,
}

impl Score {
    /// The score in an answer of the API. Errors with a sentence.
    fn read(&self, answer: &[u8]) -> Result<Scores, String> {
        let answer_text = || excerpt(answer);
        let value: Value =
            serde_json::from_slice(answer).map_err(|_| format!("the answer is no JSON: {}", answer_text()))?;
        let text = value["choices"][0]["message"]["content"].as_str();
        let text = text.ok_or_else(|| format!("the answer has no choices[0].message.content: {}", answer_text()))?;
        let begin = (text.len().saturating_sub(MAX_JUDGEMENT)..text.len()).find(|&at| text.is_char_boundary(at));
        let end = &text[begin.unwrap_or(0)..];
        let found = self.pattern.captures_iter(end).last().and_then(|captures| captures.get(1)?.as_str().parse().ok());
        match found {
            Some(score) if (self.least..=self.most).contains(&score) => {
                Ok(Scores { rewards: vec![Some(score)], ..Scores::default() })
            }
            Some(score) => Err(format!("the judge's score {score} is outside of `score_range`")),
            None => {
                Err(format!("the judgement has no score that `score_pattern` matches: {}", excerpt(end.as_bytes())))
            }
        }
    }
}

impl Reward for Judge {
    fn score(&mut self, samples: &[Sample], deadline: Deadline) -> Result<Scores> {
        let request = |sample| Ok(self.config.request(&self.template.fill(sample)?));
        let requests = samples.iter().map(request).collect::<Result<Vec<_>>>()?;
        let (remote, score) = (self.remote.clone(), self.score.clone());
        let ask = move |body: &Vec<u8>| remote.ask(body, deadline, |answer| score.read(answer));
        let answers = in_parallel(requests, self.config.concurrency, deadline, ask)?;
        let batches: Vec<_> = samples.chunks(1).collect();
        self.config.on_error.scores(&batches, answers)
    }
}
