//! Conversations: completions of several turns, which an environment answers.

use super::sample::{Draw, End, Sample, seed_of};
use ottava_common::error::{Error, Result};
use ottava_data::{Chat, ChatTemplate, Prompt, Tokenizer};
use ottava_rewards::{Deadline, Environment, Episode, Prompt as Message, Step, Steps};
use ottava_settings::RunConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// In place of the seed of a run, for the seeds of the turns after the first turn.
const TURN: u64 = 0x7475_726e;

/// A completion in progress.
pub(super) struct Conversation<'p> {
    prompt: &'p Prompt,
    /// The prompt as rewards and environments read it.
    pub(super) told: &'p Message,
    /// The number of the completion among the completions of its prompt.
    pub(super) index: usize,
    seed: u64,
    /// What was drawn and answered so far.
    pub(super) so_far: SoFar,
}

/// What was drawn of a completion, and answered.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct SoFar {
    /// The prompt and all tokens so far.
    pub(super) sample: Sample,
    /// The messages after the prompt.
    pub(super) messages: Vec<Value>,
    /// The sum of the rewards that the environment has returned, if it has returned any.
    reward: Option<f64>,
    is_over: bool,
}

impl<'p> Conversation<'p> {
    /// The completion number `index` of `prompt`, before its first turn, which is drawn with `seed`.
    pub(super) fn new(prompt: &'p Prompt, told: &'p Message, index: usize, seed: u64) -> Conversation<'p> {
        let (tokens, logprobs, turns) = (Vec::new(), Vec::new(), Vec::new());
        let sample = Sample { prompt: prompt.tokens.clone(), tokens, logprobs, turns, end: End::Length };
        let so_far = SoFar { sample, messages: Vec::new(), reward: None, is_over: false };
        Conversation { prompt, told, index, seed, so_far }
    }

    /// What the next turn is drawn from: all tokens so far, and a seed.
    pub(super) fn next_turn(&self, max_tokens: usize) -> Draw {
        let seed = match self.so_far.sample.turns.len() as u64 {
            0 => self.seed,
            turn => seed_of([TURN, self.seed, turn, 0]),
        };
        Draw { prompt: [&self.so_far.sample.prompt[..], &self.so_far.sample.tokens].concat(), seed, max_tokens }
    }

    /// Whether a turn follows.
    pub(super) fn is_open(&self) -> bool {
        !self.so_far.is_over
    }

    /// Adds a turn. It is the last turn, unless the environment answers it.
    pub(super) fn add_turn(&mut self, turn: Sample) {
        self.so_far.sample.add_turn(turn);
        self.so_far.is_over = true;
    }

    /// As rewards and environments see the conversation, with the text and the tokens of a completion, before step `step`.
    pub(super) fn told<'a>(
        &'a self,
        completion: &'a str,
        completion_ids: &'a [u32],
        step: u64,
    ) -> ottava_rewards::Sample<'a> {
        ottava_rewards::Sample {
            prompt: self.told,
            completion,
            completion_ids,
            truncated: !self.so_far.sample.is_complete(),
            group: self.prompt.document as u64,
            index: self.index,
            step,
            environment: self.so_far.reward,
            record: &self.prompt.columns,
            model_scores: &[],
        }
    }
}

/// The text of `tokens` without the end-of-sequence tokens at its end.
pub(super) fn text_of(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String> {
    let ends = tokenizer.eos_ids();
    let end = tokens.iter().rposition(|token| !ends.contains(token)).map_or(0, |last| last + 1);
    tokenizer.decode(&tokens[..end])
}

/// The environment of a run.
pub(super) struct Answers {
    environment: Box<dyn Environment>,
    max_turns: usize,
    /// Tokens of a conversation, at most.
    max_length: usize,
    /// Renders messages after prompts that are chats.
    template: Option<ChatTemplate>,
}

impl Answers {
    /// Starts the environment of `run`, if it has one.
    ///
    /// Errors with [`Error::Config`] if the environment cannot be started, and with the errors of [`RunConfig::chat_template`].
    pub(super) fn of_run(run: &RunConfig, tokenizer: &Tokenizer) -> Result<Option<Answers>> {
        let environment = &run.reinforcement.environment;
        if !environment.is_on() {
            return Ok(None);
        }
        Ok(Some(Answers {
            max_turns: environment.max_turns,
            max_length: run.data.max_length,
            template: run.chat_template(tokenizer)?,
            environment: environment
                .start()
                .map_err(|error| Error::Config(format!("`reinforcement.environment`: {error}")))?,
        }))
    }

    /// Answers the last turn of each of `conversations`, before step `step` of training: adds rewards, and messages where a turn follows. Returns
    /// numbers for the log.
    ///
    /// Errors as [`Environment::step`], and with [`Error::External`] if a message cannot follow a conversation.
    pub(super) fn answer(
        &mut self,
        conversations: &mut [&mut Conversation],
        tokenizer: &Tokenizer,
        step: u64,
    ) -> Result<BTreeMap<String, f64>> {
        let mut turns = Vec::with_capacity(conversations.len());
        for conversation in &mut *conversations {
            let turn = conversation.so_far.sample.turns.last().expect("a turn was drawn").clone();
            let tokens = conversation.so_far.sample.tokens[turn].to_vec();
            let text = text_of(tokenizer, &tokens)?;
            conversation.so_far.messages.push(Chat::message("assistant", &text));
            turns.push((tokens, text));
        }
        let episodes: Vec<Episode> = conversations
            .iter()
            .zip(&turns)
            .map(|(conversation, (tokens, text))| Episode {
                sample: conversation.told(text, tokens, step),
                turn: conversation.so_far.sample.turns.len() - 1,
                last: self.is_last(conversation),
                messages: &conversation.so_far.messages,
            })
            .collect();
        let Steps { steps, metrics } =
            self.environment.step(&episodes, Deadline::never()).map_err(|error| match error {
                Error::External(words) => named(&words),
                error => error,
            })?;
        drop(episodes);
        for (conversation, step) in conversations.iter_mut().zip(steps) {
            self.take(conversation, step, tokenizer)?;
        }
        Ok(metrics.into_iter().map(|(name, value)| (format!("environment/{name}"), value)).collect())
    }

    fn is_last(&self, conversation: &Conversation) -> bool {
        !conversation.so_far.sample.is_complete() || conversation.so_far.sample.turns.len() >= self.max_turns
    }

    /// Takes the answer to the last turn of `conversation`.
    fn take(&self, conversation: &mut Conversation, step: Step, tokenizer: &Tokenizer) -> Result<()> {
        let place = format!("completion {} of prompt {}", conversation.index, conversation.prompt.document);
        if let Some(reward) = step.reward {
            let sum = conversation.so_far.reward.get_or_insert(0.0);
            *sum += reward;
            if !sum.is_finite() {
                return Err(named(&format!("the sum of the rewards of {place} is too large")));
            }
        }
        if step.done && conversation.so_far.sample.is_complete() {
            conversation.so_far.sample.end = End::Environment;
        }
        let (false, false, Some(message)) = (step.done, self.is_last(conversation), step.message) else {
            return Ok(());
        };
        let tokens = self.tokens_of(conversation, &message, tokenizer);
        let tokens = tokens.map_err(|words| named(&format!("its message for {place}: {words}")))?;
        let sample = &mut conversation.so_far.sample;
        if sample.prompt.len() + sample.tokens.len() + tokens.len() >= self.max_length {
            sample.end = End::Length;
            return Ok(());
        }
        sample.tokens.extend(tokens);
        match message {
            Message::Text(text) => conversation.so_far.messages.push(Chat::message("user", &text)),
            Message::Messages(messages) => conversation.so_far.messages.extend(messages),
        }
        conversation.so_far.is_over = false;
        Ok(())
    }

    /// The tokens of a message after the last turn of `conversation`: of the text itself after a text, and of the chat template's text after a chat.
    fn tokens_of(
        &self,
        conversation: &Conversation,
        message: &Message,
        tokenizer: &Tokenizer,
    ) -> std::result::Result<Vec<u32>, String> {
        let encode = |text: &str| tokenizer.encode(text).map_err(|error| error.to_string());
        let messages = match (conversation.told, message) {
            (Message::Text(_), Message::Text(text)) => return encode(text),
            (Message::Text(_), Message::Messages(_)) => {
                return Err("the prompt is a text, so a message is a text too".into());
            }
            (Message::Messages(_), Message::Text(text)) => vec![Chat::message("user", text)],
            (Message::Messages(_), Message::Messages(messages)) => messages.clone(),
        };
        let template = self.template.as_ref().ok_or("the model has no chat template")?;
        let tokens = encode(&template.continuation(&conversation.prompt.columns, &messages)?)?;
        // The turn may have ended with the token that the template writes after an answer.
        let is_drawn = tokens.first().is_some_and(|first| conversation.so_far.sample.tokens.last() == Some(first));
        Ok(tokens[usize::from(is_drawn)..].to_vec())
    }
}

fn named(words: &str) -> Error {
    Error::External(format!("`reinforcement.environment`: {words}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Answers every turn with the same step.
    struct Same(Step);

    impl Environment for Same {
        fn step(&mut self, episodes: &[Episode], _: Deadline) -> Result<Steps> {
            Ok(Steps { steps: vec![self.0.clone(); episodes.len()], metrics: BTreeMap::new() })
        }
    }

    const TEMPLATE: &str = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}assistant{% endif %}";

    /// The tokenizer and the chat template of a few words.
    fn words() -> (Tokenizer, Option<ChatTemplate>) {
        let folder = tempfile::tempdir().unwrap();
        let words = ["<end>", "<unk>", "user", "assistant", "start", "left", "wall"];
        let vocabulary: serde_json::Map<_, _> =
            words.iter().zip(0..).map(|(word, id)| (word.to_string(), json!(id))).collect();
        let special = json!({"id": 0, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [special], "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        });
        for (name, text) in [
            ("tokenizer.json", tokenizer.to_string()),
            ("tokenizer_config.json", json!({"eos_token": "<end>"}).to_string()),
            ("chat_template.jinja", TEMPLATE.into()),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let template = ChatTemplate::load(folder.path(), None, ottava_data::Clock::Fixed).unwrap();
        (Tokenizer::load(folder.path()).unwrap(), template)
    }

    /// The conversation after `turn` and the answer `step`, after the prompt "user start <end> assistant" or "start".
    fn answered(is_chat: bool, turn: &[u32], end: End, step: Step, max_length: usize) -> Result<Sample> {
        let (tokenizer, template) = words();
        let asked = if is_chat { json!([{"role": "user", "content": "start"}]) } else { json!("start") };
        let told = if is_chat { Message::Messages(vec![asked[0].clone()]) } else { Message::Text("start".into()) };
        let columns = json!({"prompt": asked}).as_object().unwrap().clone();
        let tokens = if is_chat { vec![2, 4, 0, 3] } else { vec![4] };
        let prompt = Prompt { set: String::new(), document: 3, tokens, columns };
        let mut answers = Answers { environment: Box::new(Same(step)), max_turns: 2, max_length, template };
        let mut conversation = Conversation::new(&prompt, &told, 1, 7);
        for _ in 0..2 {
            conversation.add_turn(Sample::of_turn(Vec::new(), turn.to_vec(), vec![-0.5; turn.len()], end));
            answers.answer(&mut [&mut conversation], &tokenizer, 0)?;
            if !conversation.is_open() {
                break;
            }
        }
        Ok(conversation.so_far.sample)
    }

    fn says(message: Message) -> Step {
        Step { done: false, message: Some(message), reward: None }
    }

    #[test]
    fn messages_follow_the_tokens_that_were_drawn() {
        let wall = || says(Message::Text("wall".into()));
        // The template closes the answer with the token that was drawn. No message follows the last turn.
        let chat = answered(true, &[5, 0], End::Text, wall(), 16).unwrap();
        assert_eq!((chat.tokens, chat.turns, chat.end), (vec![5, 0, 2, 6, 0, 3, 5, 0], vec![0..2, 6..8], End::Text));
        let messages = says(Message::Messages(vec![Chat::message("assistant", "wall")]));
        assert_eq!(answered(true, &[5, 0], End::Text, messages, 16).unwrap().tokens, [5, 0, 3, 6, 0, 3, 5, 0]);
        assert_eq!(answered(false, &[5, 0], End::Text, wall(), 16).unwrap().tokens, [5, 0, 6, 5, 0]);
        // A turn that was cut is the last turn, and so is a turn without room for another.
        let cut = answered(false, &[5, 5], End::Length, wall(), 16).unwrap();
        assert_eq!((cut.tokens, cut.end), (vec![5, 5], End::Length));
        let full = answered(false, &[5, 0], End::Text, wall(), 4).unwrap();
        assert_eq!((full.tokens, full.end), (vec![5, 0], End::Length));
        assert_eq!(answered(false, &[5, 0], End::Text, wall(), 5).unwrap().turns.len(), 2);
        let done = answered(false, &[5, 0], End::Text, Step { done: true, ..wall() }, 16).unwrap();
        assert_eq!((done.tokens, done.end), (vec![5, 0], End::Environment));
    }

    #[test]
    fn answers_that_cannot_be_used_name_the_environment() {
        let wall = || says(Message::Text("wall".into()));
        let rich = Step { reward: Some(f64::MAX), ..wall() };
        let error = answered(false, &[5, 0], End::Text, rich, 16).unwrap_err().to_string();
        assert!(error.ends_with("the sum of the rewards of completion 1 of prompt 3 is too large"), "{error}");
        let messages = says(Message::Messages(vec![Chat::message("user", "wall")]));
        let error = answered(false, &[5, 0], End::Text, messages, 16).unwrap_err();
        assert!(matches!(error, Error::External(_)), "{error:?}");
    }

    #[test]
    fn each_turn_has_a_seed_of_its_own() {
        let (told, columns) = (Message::Text("start".into()), serde_json::Map::new());
        let prompt = Prompt { set: String::new(), document: 0, tokens: vec![4], columns };
        let mut seeds = std::collections::HashSet::new();
        for seed in 0..50 {
            let mut conversation = Conversation::new(&prompt, &told, 0, seed);
            for _ in 0..4 {
                let Draw { prompt, seed, .. } = conversation.next_turn(1);
                conversation.add_turn(Sample::of_turn(prompt, vec![5], vec![-0.5], End::Text));
                seeds.insert(seed);
            }
        }
        assert_eq!(seeds.len(), 200);
    }
}
