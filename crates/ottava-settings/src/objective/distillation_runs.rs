//! What distillation asks of the other settings of a run, and what they say of the teacher.

use crate::demands::Problems;
use crate::{DistillationConfig, RunConfig};
use ottava_common::error::{Error, Result};
use ottava_data::Packing;
use ottava_models::{ConfigFile, DecoderConfig, language_model_config};
use ottava_recipe::{Precision, Recipe, RecipeName};
use ottava_tensor::Device;
use std::path::{Path, PathBuf};

impl RunConfig {
    /// Problems of `[distillation]`, and of other settings that do not go together with it.
    pub(crate) fn distillation_problems(&self) -> Vec<String> {
        let d = &self.distillation;
        if !d.is_on() {
            return Vec::new();
        }
        let mut all = Problems::default();
        all.demand(
            (0.0..=1.0).contains(&d.beta),
            "`distillation.beta` must be from 0 (the forward KL divergence) to 1 (the reverse KL divergence)",
        );
        all.demand(
            d.temperature.is_finite() && d.temperature > 0.0,
            "`distillation.temperature` must be above 0: logits are divided by it",
        );
        all.demand(
            (0.0..=1.0).contains(&d.lmbda),
            "`distillation.lmbda` is a share of the steps, from 0 (all completions are from the data) to 1 (the model draws all completions)",
        );
        all.demand(
            d.max_completion_length > 0,
            "`distillation.max_completion_length` is 0; a drawn completion has at least one token",
        );
        all.demand(
            !d.draws() || (matches!(self.data.packing, Packing::Auto | Packing::None) && self.data.document_mask != Some(true)),
            "`distillation.lmbda` is above 0, and a drawn completion has a row of its own: set `data.packing` to \"none\" or \"auto\", and leave out \
             `data.document_mask`",
        );
        all.demand(
            self.preference.losses().is_empty() && !self.reinforcement.is_on(),
            "`distillation.teacher` or `distillation.logits` is set, and the run has another objective too: a loss of preferences (`preference.loss_type`, or records of \
             preferences) or `reinforcement.rewards`; a run has one objective, so remove one of them",
        );
        let p = &self.parallel;
        for (key, ranks) in [("pipeline", p.pipeline), ("context", p.context)] {
            all.demand(
                ranks == 1 && !p.auto,
                format!(
                    "`parallel.{key}` is {ranks}, and the teacher's distributions of `[distillation]` are for whole rows and for a model with all layers; set it \
                     to 1, and `parallel.auto` to false"
                ),
            );
        }
        all.demand(
            p.expert == 1 || !d.draws(),
            "`distillation.lmbda` is above 0, and `parallel.expert` is above 1; ranks that divide experts draw the same completions, and their rows differ: \
             set one of them to its default",
        );
        if d.is_stored() {
            self.stored_problems(&mut all);
        }
        all.0
    }

    /// Problems of a run that reads the teacher's distributions from a folder.
    fn stored_problems(&self, all: &mut Problems) {
        let d = &self.distillation;
        all.demand(
            d.teacher.as_os_str().is_empty(),
            "`distillation.teacher` and `distillation.logits` are both set: a run has a teacher beside the model, or its stored distributions; remove one \
             of them (`ottava logits` has the option --teacher)",
        );
        all.demand(
            d.lmbda == 0.0,
            "`distillation.lmbda` is above 0, and `distillation.logits` has no distributions for completions that the model draws; set `lmbda` to 0, or \
             `distillation.teacher`",
        );
        all.demand(d.top_k > 0, "`distillation.top_k` is 0; a distribution has at least one token");
        all.demand(
            self.data.packing != Packing::Wrapped,
            "`data.packing` is \"wrapped\", and `distillation.logits` has the distributions of whole documents; set it to \"bfd\", \"none\" or \"auto\"",
        );
        all.demand(
            self.data.packing == Packing::None || self.data.document_mask != Some(false),
            "`data.document_mask` is false, and the distributions of `distillation.logits` are of documents alone; set it to true, or `data.packing` to \
             \"none\"",
        );
    }

    /// Gives each document a row of its own if the model draws completions: padding comes after the only document of a row, where causal attention does
    /// not see it. Keeps documents whole if their distributions are stored.
    pub(crate) fn resolve_distillation(&mut self) {
        if self.distillation.draws() {
            (self.data.packing, self.data.document_mask) = (Packing::None, Some(false));
        }
        if self.distillation.is_stored() && self.data.packing == Packing::Auto {
            self.data.packing = Packing::Bfd;
        }
    }

    /// Lets the head compute logits in F32 if they are compared with a teacher's: small differences of distributions are what is learned.
    pub(crate) fn shape_student(&self, sizes: &mut DecoderConfig, file: &ConfigFile) -> Result<()> {
        if !self.distillation.is_on() {
            return Ok(());
        }
        if sizes.head.cap.is_some() {
            return Err(file.error(
                "the model bounds its logits, which distillation does not differentiate; train a model without `final_logit_softcapping`, or remove `distillation.teacher` and `distillation.logits`",
            ));
        }
        sizes.head.wide_logits = true;
        Ok(())
    }

    /// The run with the model in `teacher` beside its model, in the place of stored distributions.
    pub fn with_teacher(&self, teacher: &Path) -> RunConfig {
        let distillation =
            DistillationConfig { teacher: teacher.into(), logits: PathBuf::new(), ..self.distillation.clone() };
        RunConfig { distillation, ..self.clone() }
    }

    /// The likeliest tokens that are known of each stored distribution.
    ///
    /// Errors with [`Error::Config`] if the vocabulary of the model has fewer tokens.
    pub fn known_tokens(&self) -> Result<usize> {
        let (top_k, vocabulary) = (self.distillation.top_k, self.decoder_config()?.vocabulary);
        match top_k <= vocabulary {
            true => Ok(top_k),
            false => Err(Error::Config(format!(
                "`distillation.top_k` is {top_k}, and the model of {} has {vocabulary} tokens in its vocabulary; set top_k to at most that",
                self.model.path.display()
            ))),
        }
    }

    /// The sizes of the teacher.
    ///
    /// Errors with [`Error::Config`] when its vocabulary differs from the vocabulary of the model that is trained, or when it has too few positions.
    pub fn teacher_sizes(&self) -> Result<DecoderConfig> {
        let folder = &self.distillation.teacher;
        let teacher = language_model_config(&ConfigFile::read(folder)?)?;
        let (own, other) = (self.decoder_config()?.vocabulary, teacher.vocabulary);
        if own != other {
            return Err(Error::Config(format!(
                "`distillation.teacher` ({}) has {other} tokens in its vocabulary (`vocab_size`), and the model of {} has {own}; choose a teacher with the \
                 same vocabulary",
                folder.display(),
                self.model.path.display()
            )));
        }
        if self.data.max_length > teacher.context() {
            return Err(Error::Config(format!(
                "`data.max_length` is {}, and `distillation.teacher` ({}) has {} positions; set max_length to at most that",
                self.data.max_length,
                folder.display(),
                teacher.context()
            )));
        }
        Ok(teacher)
    }

    /// Returns the recipe of the teacher on `device`.
    pub fn teacher_recipe(&self, device: &Device) -> Recipe {
        let recipe = self.distillation.teacher_recipe.unwrap_or(self.recipe_without_history());
        self.frozen_recipe(Precision { recipe, ..Precision::default() }, device)
    }

    /// Returns the recipe on `device` of the model of the start, if it is the reference model of reinforcement learning: the recipe of the run.
    pub fn reference_recipe(&self, device: &Device) -> Recipe {
        self.frozen_recipe(Precision { recipe: self.recipe_without_history(), ..self.precision.clone() }, device)
    }

    /// A model that never trains has no history of amaxes.
    fn recipe_without_history(&self) -> RecipeName {
        match self.precision.recipe {
            RecipeName::Fp8Delayed => RecipeName::Fp8Current,
            of_run => of_run,
        }
    }

    fn frozen_recipe(&self, precision: Precision, device: &Device) -> Recipe {
        precision.recipe_on(device, self.micro_batch_rows() * self.data.max_length)
    }
}
