//! What a classifier asks of the other settings of a run, and what its model folder says.

use super::classification::ProblemType;
use crate::demands::Problems;
use crate::{RunConfig, WeightInit};
use ottava_common::error::{Error, Result};
use ottava_models::{ConfigFile, Labels, labels_of};
use std::collections::BTreeSet;

impl RunConfig {
    /// Problems of `[classification]`.
    pub(crate) fn classification_problems(&self) -> Vec<String> {
        let c = &self.classification;
        let mut all = Problems::default();
        let (number, names) = (c.num_labels, c.label_names.len());
        all.demand(
            number == 0 || names == 0 || number == names,
            format!("`classification.num_labels` is {number}, and `classification.label_names` has {names} names; remove one of them"),
        );
        let distinct: BTreeSet<&String> = c.label_names.iter().collect();
        all.demand(
            distinct.len() == names && !distinct.iter().any(|name| name.is_empty()),
            "`classification.label_names` has a name twice or an empty name; each label has a name of its own",
        );
        all.demand(
            c.problem_type != Some(ProblemType::SingleLabelClassification) || number.max(names) != 1,
            "`classification.problem_type` is \"single_label_classification\" with one label, whose loss is always 0; set \"regression\" for a number, \
             or \"multi_label_classification\" for a label that a text has or not",
        );
        all.0
    }

    /// Completes `[classification]` by the folder of the model.
    ///
    /// Errors with [`Error::Config`] if neither the settings nor the folder say how many labels there are.
    pub(crate) fn resolve_classification(&mut self) -> Result<()> {
        if !self.classification.is_on() {
            return Ok(());
        }
        // A folder that cannot be read is an error where its sizes are.
        let of_folder = ConfigFile::read(&self.model.path).and_then(|file| labels_of(&file)).unwrap_or(None);
        let c = &mut self.classification;
        let own = c.num_labels.max(c.label_names.len());
        let known = of_folder.filter(|labels| own == 0 || own == labels.names.len());
        let count = match (own, &known) {
            (0, Some(labels)) => labels.names.len(),
            (0, None) if c.problem_type == Some(ProblemType::Regression) => 1,
            (0, None) => {
                return Err(Error::Config(
                    "`classification.num_labels` is 0, and the folder of the model has no labels; set it, or `classification.label_names`".into(),
                ));
            }
            (own, _) => own,
        };
        if let Some(labels) = known.as_ref().filter(|_| self.model.init == WeightInit::Pretrained) {
            expect_order(&c.label_names, &labels.names)?;
        }
        if c.label_names.is_empty() {
            c.label_names = known.as_ref().map_or_else(|| Labels::numbered(count).names, |labels| labels.names.clone());
        }
        let named = known.and_then(|labels| ProblemType::named(labels.problem_type.as_deref()?));
        c.num_labels = count;
        c.problem_type = Some(c.problem_type.or(named).unwrap_or(ProblemType::of_labels(count)));
        let problems = self.classification_problems();
        if problems.is_empty() { Ok(()) } else { Err(Error::Config(problems.join("\n"))) }
    }
}

/// Errors if `own` are the labels `of_folder` in another order, since the rows of the head have the order of the folder.
fn expect_order(own: &[String], of_folder: &[String]) -> Result<()> {
    let set = |names: &[String]| names.iter().cloned().collect::<BTreeSet<_>>();
    if own == of_folder || set(own) != set(of_folder) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "`classification.label_names` has the labels of the model's folder in another order, and the head of the folder keeps its order: {}; write them in \
         this order, or leave `label_names` out",
        of_folder.join(", ")
    )))
}
