//! Completions of prompts by the model as it is now, with their rewards.

use super::ahead::sample_ahead;
use super::clients::{Clients, Returned, Wanted};
use super::completion::{Completion, Generation};
use super::conversation::{Answers, Conversation, text_of};
use super::drawer::{DrawSizes, Drawer};
use super::reward_model::RewardRows;
use super::sample::{Draw, Drawn, sample};
use crate::objective::FrozenModel;
use ottava_common::error::{Error, Result};
use ottava_data::{Prompt, Tokenizer};
use ottava_engine::Engine;
use ottava_models::Decoder;
use ottava_parallel::{Partition, Ranks};
use ottava_rewards::{Deadline, RewardSpec, Rewards, Sample};
use ottava_settings::RunConfig;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

/// A prompt with the seeds of its completions.
pub(super) type Seeded = (Prompt, Vec<u64>);

/// Draws and scores completions.
pub(super) struct Generator {
    max_completion_length: usize,
    tokenizer: Tokenizer,
    /// Whether an environment answers turns.
    has_environment: bool,
    /// Of the ranks that draw together, only the first rank has judges.
    judges: RefCell<Option<Judges>>,
    /// For each reward model.
    reward_rows: Vec<RewardRows>,
    drawer: RefCell<Drawer>,
    /// What collects the completions of clients, if they draw the completions of generations.
    clients: RefCell<Option<Box<dyn Clients>>>,
}

/// What answers and scores completions.
struct Judges {
    /// The environment, if there is one.
    answers: Option<Answers>,
    rewards: Rewards,
}

/// What a rank draws.
pub(super) struct Work<'a> {
    /// The prompts, with the seeds of their completions.
    pub(super) prompts: &'a [Seeded],
    /// What an earlier generation has drawn of these completions, in their order.
    pub(super) begun: &'a [Drawn],
    /// Prompts of the next generation, whose completions may begin.
    pub(super) ahead: &'a [Seeded],
    /// The step that the completions are drawn for.
    pub(super) step: u64,
    /// Whether the most likely completions are drawn.
    pub(super) is_greedy: bool,
}

impl Generator {
    /// Makes a generator for generations with so many `completions` of this rank. The first of the `ranks` that draw together starts the environment
    /// and what scores completions.
    ///
    /// Errors with [`Error::Config`](ottava_common::Error::Config) when the environment cannot be started or a reward cannot be made.
    pub(super) fn new(run: &RunConfig, completions: usize, ranks: &Ranks) -> Result<Generator> {
        let tokenizer = Tokenizer::load(run.tokenizer_path())?;
        let judges = || {
            let answers = Answers::of_run(run, &tokenizer)?;
            Ok::<_, Error>(Judges { answers, rewards: RewardSpec::build(&run.reinforcement.rewards)? })
        };
        let judges = ranks.leads_draws().then(judges).transpose()?;
        Ok(Generator {
            max_completion_length: run.reinforcement.max_completion_length,
            has_environment: run.reinforcement.environment.is_on(),
            judges: RefCell::new(judges),
            reward_rows: RewardRows::of_run(run, &tokenizer)?,
            tokenizer,
            // A generation may have more completions than the first draws: an evaluation may come first.
            drawer: RefCell::new(Drawer::new(DrawSizes::of_generation(run, completions))),
            clients: RefCell::new(None),
        })
    }

    /// Lets `clients` draw the completions of generations.
    pub(super) fn connect(&self, clients: Box<dyn Clients>) {
        *self.clients.borrow_mut() = Some(clients);
    }

    /// Collects the groups of completions that are `wanted` from clients, which draw with `model`. Returns `None` if the run draws its completions.
    ///
    /// Errors as [`Clients::collect`].
    pub(super) fn collect(
        &self,
        model: &mut Decoder,
        partition: &Partition,
        wanted: Wanted,
    ) -> Result<Option<Vec<Vec<Completion>>>> {
        let Some(clients) = &mut *self.clients.borrow_mut() else { return Ok(None) };
        let groups = self.drawer.borrow_mut().lend(model, partition, |engine| clients.collect(engine, wanted))?;
        let completion =
            |Returned { sample, reward }| Completion { sample, old: None, values: None, reward, scores: Vec::new() };
        Ok(Some(groups.into_iter().map(|group| group.into_iter().map(completion).collect()).collect()))
    }

    /// The token that ends a text.
    pub(super) fn end(&self) -> u32 {
        self.tokenizer.eos_id().unwrap_or(0)
    }

    /// The text of `tokens`, with its special tokens.
    pub(super) fn text(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens)
    }

    /// Draws and scores completions. Returns them in the order of prompts and seeds. `reward_models` are the reward models of the run. All ranks of
    /// `partition` call it together.
    ///
    /// Errors as [`sample`], [`Answers::answer`] and [`Rewards::score`].
    pub(super) fn generate(
        &self,
        model: &mut Decoder,
        partition: &Partition,
        reward_models: &[FrozenModel],
        work: &Work,
    ) -> Result<Generation> {
        let told: Vec<ottava_rewards::Prompt> = work.prompts.iter().map(|(prompt, _)| told(prompt)).collect();
        let mut conversations = Vec::new();
        for ((prompt, seeds), told) in work.prompts.iter().zip(&told) {
            let begin = |(index, &seed)| Conversation::new(prompt, told, index, seed);
            conversations.extend(seeds.iter().enumerate().map(begin));
        }
        let begin = Instant::now();
        let (mut metrics, begun) = match work.ahead.is_empty() {
            true => (self.draw(model, partition, &mut conversations, work)?, Vec::new()),
            false => (BTreeMap::new(), self.draw_ahead(model, partition, &mut conversations, work)?),
        };
        let drawn = Instant::now();
        let scored = || self.score(conversations, reward_models, work.step);
        let generation = partition.ranks().of_first_drawing("completions with their rewards", scored)?;
        metrics.extend(generation.metrics);
        metrics.insert("timing_s/gen".into(), (drawn - begin).as_secs_f64());
        metrics.insert("timing_s/reward".into(), drawn.elapsed().as_secs_f64());
        Ok(Generation { metrics, begun, ..generation })
    }

    /// Draws what is left of `conversations`, which have one turn, and begins completions of the prompts ahead. Returns the tokens of the
    /// completions that were begun.
    fn draw_ahead(
        &self,
        model: &mut Decoder,
        partition: &Partition,
        conversations: &mut [Conversation],
        work: &Work,
    ) -> Result<Vec<Drawn>> {
        let (most, stop_ids) = (self.max_completion_length, self.tokenizer.eos_ids());
        let rest = |(at, of): (usize, &Conversation)| Some((at, work.begun[at].rest(of.next_turn(most))?));
        let (places, wanted): (Vec<_>, Vec<_>) = conversations.iter().enumerate().filter_map(rest).unzip();
        let begins = |(prompt, seeds): &Seeded| -> Vec<Draw> {
            let draw = |&seed| Draw { prompt: prompt.tokens.clone(), seed, max_tokens: most };
            seeds.iter().map(draw).collect()
        };
        let ahead: Vec<Draw> = work.ahead.iter().flat_map(begins).collect();
        let most_at_once = conversations.len();
        let draw =
            |engine: &mut Engine| sample_ahead(engine, [&wanted, &ahead], most_at_once, stop_ids, partition.ranks());
        let (drawn, begun) = self.drawer.borrow_mut().lend(model, partition, draw)?;
        let mut rests = vec![None; conversations.len()];
        places.into_iter().zip(drawn).for_each(|(at, rest)| rests[at] = Some(rest));
        for ((conversation, known), rest) in conversations.iter_mut().zip(work.begun).zip(rests) {
            let turn = known.clone().with(rest).turn(conversation.so_far.sample.prompt.clone());
            conversation.add_turn(turn);
        }
        Ok(begun)
    }

    /// Draws all turns of `conversations`. Returns the numbers that the environment returned, their mean over turns.
    fn draw(
        &self,
        model: &mut Decoder,
        partition: &Partition,
        conversations: &mut [Conversation],
        &Work { step, is_greedy, .. }: &Work,
    ) -> Result<BTreeMap<String, f64>> {
        let (most, stop_ids) = (self.max_completion_length, self.tokenizer.eos_ids());
        // The head applies the temperature of the run.
        let temperature = if is_greedy { 0.0 } else { 1.0 };
        let mut means = Means::default();
        // All turns are drawn in one call, so that the prefix cache of the engine serves later turns.
        self.drawer.borrow_mut().lend(model, partition, |engine| {
            loop {
                let mut open: Vec<_> = conversations.iter_mut().filter(|conversation| conversation.is_open()).collect();
                if open.is_empty() {
                    return Ok(());
                }
                let wanted: Vec<_> = open.iter().map(|conversation| conversation.next_turn(most)).collect();
                let turns = sample(engine, &wanted, stop_ids, temperature)?;
                open.iter_mut().zip(turns).for_each(|(conversation, turn)| conversation.add_turn(turn));
                if self.has_environment {
                    means.add(self.answer(&mut open, partition.ranks(), step)?, open.len());
                }
            }
        })?;
        Ok(means.finish())
    }

    /// Answers the last turns of `conversations`, which all `ranks` that draw together have. Returns the numbers that the environment returned.
    fn answer(
        &self,
        conversations: &mut [&mut Conversation],
        ranks: &Ranks,
        step: u64,
    ) -> Result<BTreeMap<String, f64>> {
        let (numbers, answered) = ranks.of_first_drawing("answers of the environment", || {
            let mut judges = self.judges.borrow_mut();
            let answers = judges.as_mut().and_then(|judges| judges.answers.as_mut());
            let answers = answers.expect("the first rank has the environment");
            let numbers = answers.answer(conversations, &self.tokenizer, step)?;
            Ok((numbers, conversations.iter().map(|conversation| conversation.so_far.clone()).collect::<Vec<_>>()))
        })?;
        conversations.iter_mut().zip(answered).for_each(|(conversation, so_far)| conversation.so_far = so_far);
        Ok(numbers)
    }

    /// The rewards of `conversations`. `reward_models` score them first, in the order of the settings.
    fn score(&self, conversations: Vec<Conversation>, reward_models: &[FrozenModel], step: u64) -> Result<Generation> {
        let samples = || conversations.iter().map(|conversation| &conversation.so_far.sample);
        let models = self.reward_rows.iter().zip(reward_models);
        let by_model = models.map(|(rows, model)| rows.scores(model, samples())).collect::<Result<Vec<_>>>()?;
        let text = |conversation: &Conversation| text_of(&self.tokenizer, &conversation.so_far.sample.tokens);
        let texts: Vec<String> = conversations.iter().map(text).collect::<Result<_>>()?;
        let of_sample = |at: usize| by_model.iter().map(|scores| scores[at]).collect();
        let model_scores: Vec<Vec<f64>> = (0..conversations.len()).map(of_sample).collect();
        let drawn: Vec<_> =
            conversations.iter().map(|conversation| conversation.so_far.sample.drawn_tokens()).collect();
        let each = conversations.iter().zip(&texts).zip(&drawn).zip(&model_scores);
        let batch = each.map(|(((conversation, text), drawn), model_scores)| Sample {
            model_scores,
            ..conversation.told(text, drawn, step)
        });
        let batch: Vec<Sample> = batch.collect();
        let mut judges = self.judges.borrow_mut();
        let rewards = &mut judges.as_mut().expect("the first rank has the rewards").rewards;
        let scored = rewards.score(&batch, Deadline::never())?;
        drop(batch);
        let metrics = scored.metrics.into_iter().filter(|(name, _)| name.contains("/metrics/")).collect();
        let (rewards, scores): (Vec<_>, Vec<_>) = scored.by_reward.into_iter().unzip();
        let (mut completions, mut messages) = (Vec::new(), Vec::new());
        for (at, conversation) in conversations.into_iter().enumerate() {
            completions.push(Completion {
                sample: conversation.so_far.sample,
                old: None,
                values: None,
                reward: scored.totals[at],
                scores: scores.iter().map(|of_reward| of_reward[at]).collect(),
            });
            messages.push(conversation.so_far.messages);
        }
        let messages = self.has_environment.then_some(messages);
        Ok(Generation { completions, texts, messages, rewards, metrics, begun: Vec::new() })
    }
}

/// Means of numbers by name, over batches of different sizes.
#[derive(Default)]
struct Means(BTreeMap<String, (f64, f64)>);

impl Means {
    /// Adds numbers that are means over a batch of `count`.
    fn add(&mut self, numbers: BTreeMap<String, f64>, count: usize) {
        for (name, value) in numbers {
            let (sum, all) = self.0.entry(name).or_default();
            *sum += value * count as f64;
            *all += count as f64;
        }
    }

    fn finish(self) -> BTreeMap<String, f64> {
        self.0.into_iter().map(|(name, (sum, all))| (name, sum / all)).collect()
    }
}

/// The prompt as rewards read it: the messages or the text of its record.
fn told(prompt: &Prompt) -> ottava_rewards::Prompt {
    match prompt.columns.get("prompt") {
        Some(serde_json::Value::Array(messages)) => ottava_rewards::Prompt::Messages(messages.clone()),
        Some(serde_json::Value::String(text)) => ottava_rewards::Prompt::Text(text.clone()),
        other => ottava_rewards::Prompt::Text(other.map(ToString::to_string).unwrap_or_default()),
    }
}
