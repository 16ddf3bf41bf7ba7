//! What objectives of examples (classifiers and embedding models) ask of the other settings of a run.

use crate::RunConfig;
use crate::demands::Problems;
use ottava_common::error::{Error, Result};
use ottava_data::{Formatting, Packing, RecordKind};
use std::path::Path;

impl RunConfig {
    /// Problems of settings that do not go together with an objective of examples.
    pub(crate) fn example_problems(&self) -> Vec<String> {
        let mut all = Problems::default();
        let tables = [
            ("[classification]", self.classification.is_on()),
            ("[embedding]", self.embedding.is_on()),
            ("`distillation.teacher` or `distillation.logits`", self.distillation.is_on()),
            ("[[reinforcement.rewards]]", self.reinforcement.is_on()),
            ("`preference.loss_type`", self.preference.loss_type.is_some()),
        ];
        let set: Vec<_> = tables.iter().filter(|(_, is_on)| *is_on).map(|(name, _)| *name).collect();
        all.demand(
            set.len() < 2 || !(self.classification.is_on() || self.embedding.is_on()),
            format!("{} are both set, and a run has one objective; remove one of them", set.join(" and ")),
        );
        let Some(table) = self.objective().of_examples() else { return all.0 };
        all.demand(
            self.evaluation.tasks.is_empty(),
            format!("`evaluation.tasks` is for language models, and {table} trains another model; remove one of them"),
        );
        all.demand(
            self.generation.prompts.is_empty(),
            format!("`generation.prompts` is set, and the model of {table} writes no text; remove the prompts"),
        );
        all.demand(
            matches!(self.data.packing, Packing::Auto | Packing::None) && self.data.document_mask != Some(true),
            format!(
                "`data.packing` packs several documents into a row, and each text of {table} has a row of its own; set it to \"none\" or \"auto\", and leave \
                 out `data.document_mask`"
            ),
        );
        all.0
    }

    /// Resolves the rows of examples, whose files have records of these formattings.
    ///
    /// Errors with [`Error::Config`] if the records are not of the formatting that the objective reads.
    pub(crate) fn resolve_examples<'f>(&mut self, files: impl Iterator<Item = (Formatting, &'f Path)>) -> Result<()> {
        let objective = self.objective();
        let reads = objective.of_examples().map(|_| objective.properties().formatting);
        for (found, path) in files {
            let problem = match reads {
                Some(reads) if found != reads => format!(
                    "`data.records.formatting` is \"{}\", and the objective of the run reads records of \"{}\"; set it to \"auto\"",
                    found.as_str(),
                    reads.as_str()
                ),
                None if found.kind() == RecordKind::Examples => format!(
                    "`data.records.formatting` is \"{0}\", and the run does not train on such records; add the table [{0}], or set the formatting to \
                     \"auto\"",
                    found.as_str()
                ),
                _ => continue,
            };
            return Err(Error::Config(format!("{}: {problem}", path.display())));
        }
        if reads.is_some() {
            // Padding comes after the only text of a row, where causal attention does not see it.
            (self.data.packing, self.data.document_mask) = (Packing::None, Some(false));
        }
        Ok(())
    }
}
