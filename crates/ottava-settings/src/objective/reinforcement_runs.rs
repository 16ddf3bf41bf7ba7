//! What reinforcement learning asks of the other settings of a run.

use super::reinforcement::problems;
use crate::demands::Problems;
use crate::{CorrectionConfig, CorrectionMode, ReinforcementConfig, RunConfig, WeightInit};
use ottava_common::error::{Error, Result};
use ottava_data::{DataSet, Formatting, Packing, PromptSet, RecordKind, TrainingData};
use ottava_models::{ConfigFile, DecoderConfig, decoder_config};
use ottava_recipe::KvCacheDtype;
use ottava_rewards::RewardKind;
use ottava_tensor::ops::Correction;
use std::path::Path;

impl RunConfig {
    /// Problems of `[reinforcement]`, and of other settings that do not go together with it.
    pub(crate) fn reinforcement_problems(&self) -> Vec<String> {
        let r = &self.reinforcement;
        if !r.is_on() {
            return Vec::new();
        }
        let mut all = Problems(problems(r, self.data.max_length));
        let step = self.training.sequences();
        let group = r.num_generations.max(1);
        let generation =
            if r.prompts_per_generation == 0 { step } else { r.prompts_per_generation.saturating_mul(group) };
        all.demand(
            generation.is_multiple_of(group) && generation.is_multiple_of(step) && generation > 0,
            format!(
                "a generation has {generation} completions (`reinforcement.prompts_per_generation` times `reinforcement.num_generations` = {group}, or the completions of a step), and a step has {step}; a generation has a whole number of steps and of prompts"
            ),
        );
        let p = &self.parallel;
        for (key, ranks) in [("pipeline", p.pipeline), ("context", p.context)] {
            all.demand(
                ranks == 1,
                format!(
                    "`parallel.{key}` is {ranks}, and the ranks that draw a completion have all layers and all its tokens; set it to 1, and `tensor` or \
                     `expert` above 1 if the model is too large for one rank"
                ),
            );
        }
        all.demand(
            !p.auto,
            "`parallel.auto` is true, and it measures steps without draws; set it to false, and choose `parallel.tensor`, `parallel.expert` and `parallel.zero`",
        );
        all.demand(
            r.loss.beta == 0.0 || self.lora.r > 0 || self.model.init == WeightInit::Pretrained,
            "`reinforcement.loss.beta` is above 0, and `model.init` is \"random\": the reference model is the model that the run starts from, which has learned nothing; set one of them",
        );
        all.demand(
            self.ema.decay == 0.0 || !self.ema.evaluate,
            "`ema.evaluate` is true, and evaluations of reinforcement learning draw completions, which only the trained weights do; set it to false",
        );
        all.0.extend(environment_problems(r));
        all.0.extend(endpoint_problems(r));
        all.demand(
            self.preference.losses().is_empty(),
            "`preference.loss_type` and `reinforcement.rewards` are both set, and a run has one objective; remove one of them",
        );
        all.0
    }

    /// Returns how the losses of a run of reinforcement learning are corrected for draws, or `None` if they are not corrected.
    pub fn correction(&self) -> Option<Correction> {
        let CorrectionConfig { mode, min, max } = self.reinforcement.correction;
        let sampling = &self.reinforcement.sampling;
        let [of_sequence, is_mask] = match mode {
            CorrectionMode::Auto
                if self.precision.recipe().casts_to_fp8()
                    || sampling.kv_cache_dtype == KvCacheDtype::Fp8
                    || self.draws_are_stale() =>
            {
                [false, false]
            }
            CorrectionMode::Auto | CorrectionMode::None => return None,
            CorrectionMode::TokenTruncate => [false, false],
            CorrectionMode::TokenMask => [false, true],
            CorrectionMode::SequenceTruncate => [true, false],
            CorrectionMode::SequenceMask => [true, true],
        };
        Some(Correction { of_sequence, is_mask, min, max })
    }

    /// Returns whether older weights than the weights of a generation may have drawn some of its tokens.
    pub fn draws_are_stale(&self) -> bool {
        let r = &self.reinforcement;
        r.sampling.max_staleness > 0 || r.endpoint.is_on() && r.endpoint.max_staleness > 0
    }

    /// Returns whether each completion is in one step only, and the weights of its generation are the weights of the step.
    pub fn steps_once(&self) -> bool {
        let (r, of_step) = (&self.reinforcement, self.training.sequences());
        r.num_iterations == 1 && r.prompts(of_step) * r.num_generations == of_step
    }

    /// Returns whether the run of reinforcement learning keeps the model of the start as the reference model. With adapters, the reference model is
    /// the trained model without its adapters, unless other modules are trained too.
    pub fn has_reference_policy(&self) -> bool {
        let trains_base = self.lora.r == 0 || !self.lora.modules_to_save.is_empty();
        self.reinforcement.is_on() && self.reinforcement.loss.beta > 0.0 && trains_base
    }

    /// Returns the sizes of the reward model in `folder`, which the reward `name` reads.
    ///
    /// Errors with [`Error::Config`] when the folder has a language model, a smaller vocabulary than the model that is trained, or too few positions.
    pub fn reward_model_sizes(&self, name: &str, folder: &Path) -> Result<DecoderConfig> {
        let file = ConfigFile::read(folder)?;
        let (sizes, own) = (decoder_config(&file)?, self.decoder_config()?.vocabulary);
        let problem = if let Some(labels) = sizes.head.labels.filter(|&labels| labels > 1) {
            format!("a classifier of {labels} labels, and a reward is one score; choose a reward model")
        } else if sizes.head.labels.is_none() {
            "a language model, whose head computes tokens and no score; `ottava train` makes a reward model of it with `preference.loss_type` = \
             \"bradley_terry\""
                .to_string()
        } else if sizes.vocabulary < own {
            format!(
                "a reward model of {} tokens (`vocab_size`), and the model of {} draws from {own}; choose a reward model with the same vocabulary",
                sizes.vocabulary,
                self.model.path.display()
            )
        } else if self.data.max_length > sizes.context() {
            format!("a reward model of {} positions; set `data.max_length` to at most that", sizes.context())
        } else {
            return Ok(sizes);
        };
        Err(Error::Config(format!("reward `{name}`: `path` ({}) is {problem}", folder.display())))
    }

    /// Resolves the data of a run of reinforcement learning, whose files have records of these formattings.
    ///
    /// Errors with [`Error::Config`] when files of prompts meet a run without rewards, or other files a run with rewards.
    pub(crate) fn resolve_prompts<'f>(&mut self, files: impl Iterator<Item = (Formatting, &'f Path)>) -> Result<()> {
        let is_on = self.reinforcement.is_on();
        for (formatting, path) in files {
            match (formatting.kind() == RecordKind::Prompts, is_on) {
                (true, false) => {
                    return Err(Error::Config(format!(
                        "{}: the records are prompts (`data.records.formatting` = \"prompts\"), and nothing scores completions of them; add a table `[[reinforcement.rewards]]`, or set the formatting to \"auto\"",
                        path.display()
                    )));
                }
                (false, true) => {
                    return Err(Error::Config(format!(
                        "{}: the records are {}, and reinforcement learning reads prompts; set `data.records.formatting` to \"prompts\"",
                        path.display(),
                        formatting.as_str()
                    )));
                }
                _ => {}
            }
        }
        if is_on {
            // The objective packs completions into rows.
            (self.data.packing, self.data.document_mask) = (Packing::None, Some(false));
        }
        Ok(())
    }

    /// Returns the prompts of a run of reinforcement learning. Prompts that leave no room for `max_completion_length` tokens are left out.
    ///
    /// Errors as [`PromptSet::new`].
    pub fn prompt_sets(&self, data: &TrainingData) -> Result<Vec<PromptSet>> {
        let longest = self.data.max_length - self.reinforcement.max_completion_length;
        let set = |set: &DataSet| {
            let mut prompts = PromptSet::new(&set.name, set.dataset.clone(), &set.split, longest)?;
            prompts.share = set.share;
            Ok(prompts)
        };
        data.sets.iter().map(set).collect()
    }

    /// Lets the head compute the distribution that completions are drawn from: in F32, and at the temperature of the draws. Gives the model a value head,
    /// if values give the advantages.
    pub(crate) fn shape_policy(&self, sizes: &mut DecoderConfig, file: &ConfigFile) -> Result<()> {
        if !self.reinforcement.is_on() {
            return Ok(());
        }
        let temperature = self.reinforcement.sampling.temperature;
        if temperature != 1.0 && sizes.head.cap.is_some() {
            return Err(file.error(&format!(
                "the model bounds its logits, which a temperature of {temperature} would change; set `reinforcement.sampling.temperature` to 1"
            )));
        }
        if self.reinforcement.loss.entropy_coef > 0.0 && sizes.head.cap.is_some() {
            return Err(file.error(
                "the model bounds its logits, through which the entropy is not differentiated; set `reinforcement.loss.entropy_coef` to 0",
            ));
        }
        sizes.head.scale /= temperature as f32;
        sizes.head.wide_logits = true;
        sizes.head.value = self.reinforcement.value_loss().is_some();
        Ok(())
    }
}

/// Problems of `[reinforcement.environment]`, and of rewards that read what it returns.
fn environment_problems(config: &ReinforcementConfig) -> Vec<String> {
    let (environment, mut all) = (&config.environment, Problems::default());
    let reads = config.rewards.iter().any(|reward| matches!(reward.kind, RewardKind::Environment(_)));
    all.demand(
        environment.is_on() || !reads,
        "a reward has `type = \"environment\"`, and no environment returns rewards; set `reinforcement.environment.command`, or remove the reward",
    );
    all.demand(
        !environment.is_on() || config.sampling.max_staleness == 0,
        "`reinforcement.environment.command` and `reinforcement.sampling.max_staleness` are both set, and a conversation of several turns cannot be begun by one generation and ended by the next; remove one of them",
    );
    all.demand(
        environment.max_turns > 0,
        "`reinforcement.environment.max_turns` is 0; a completion has at least one turn",
    );
    all.0
}

/// Problems of `[reinforcement.endpoint]`, and of settings that only a run that draws its completions reads.
fn endpoint_problems(config: &ReinforcementConfig) -> Vec<String> {
    let mut all = Problems::default();
    if !config.endpoint.is_on() {
        return all.0;
    }
    all.0.extend(config.endpoint.socket_address().err().map(|error| error.to_string()));
    for (key, is_set) in [
        ("reinforcement.sampling.dynamic_sampling", config.sampling.dynamic_sampling),
        ("reinforcement.environment.command", config.environment.is_on()),
        ("reinforcement.sampling.max_staleness", config.sampling.max_staleness > 0),
    ] {
        all.demand(
            !is_set,
            format!(
                "`reinforcement.endpoint.address` and `{key}` are both set, and clients choose the prompts and play the turns; remove one of them"
            ),
        );
    }
    all.0
}
