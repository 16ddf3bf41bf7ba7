//! The table `[lr_scheduler]`: the learning rate of each step.

use crate::demands::Problems;
use crate::tagged;
use ottava_parallel::optim::{Decay, Restarts, Schedule, SchedulerType};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use toml::Value;

/// The `[lr_scheduler]` table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LrSchedulerConfig {
    /// The shape after the warm-up, and the keys of this shape.
    #[serde(flatten)]
    pub kind: SchedulerType,
    /// Steps of linear warm-up at the start of the run: a number of steps, or a share of the run's steps (below 1, rounded up to whole
    /// steps).
    pub warmup_steps: Warmup,
}

/// The length of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    /// A number of steps.
    Steps(u64),
    /// A share of the run's steps, above 0 and below 1.
    Share(f64),
}

impl Default for LrSchedulerConfig {
    fn default() -> LrSchedulerConfig {
        LrSchedulerConfig { kind: SchedulerType::Cosine(Decay::default()), warmup_steps: Warmup::Share(0.03) }
    }
}

impl LrSchedulerConfig {
    /// Reads the `[lr_scheduler]` table.
    pub(super) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<LrSchedulerConfig, D::Error> {
        tagged::read(from, "type", "cosine")
    }

    /// Returns the learning rates of a run of `max_steps` steps with the peak learning rate `peak`.
    pub(super) fn schedule(&self, peak: f64, max_steps: u64) -> Schedule {
        Schedule { kind: self.kind, peak, warmup_steps: self.warmup_steps.of(max_steps), max_steps }
    }

    /// Lists the problems of the values in a run with the peak learning rate `peak`, one sentence each.
    pub(super) fn problems(&self, peak: f64) -> Vec<String> {
        let mut problems = Problems::default();
        if let Some(minimum) = self.kind.minimum() {
            problems.demand(
                (0.0..=peak).contains(&minimum),
                "`lr_scheduler.min_learning_rate` lies outside 0 to `optimizer.learning_rate`",
            );
            problems.demand_single("lr_scheduler.min_learning_rate", minimum);
        }
        match self.kind {
            SchedulerType::CosineWithRestarts(Restarts { num_cycles, .. }) => {
                problems.demand_count("lr_scheduler.num_cycles", num_cycles);
            }
            SchedulerType::Polynomial(decay) => problems.demand(
                decay.power.is_finite() && decay.power > 0.0,
                format!("`lr_scheduler.power` is {}; it is a number above 0", decay.power),
            ),
            _ => {}
        }
        problems.demand_steps("lr_scheduler.decay_steps", self.kind.decay_steps());
        problems.demand_steps("lr_scheduler.warmup_steps", self.warmup_steps.of(0));
        problems.0
    }
}

impl Warmup {
    /// Returns the number of warm-up steps in a run of `max_steps` steps.
    pub fn of(self, max_steps: u64) -> u64 {
        match self {
            Warmup::Steps(steps) => steps,
            Warmup::Share(share) => (share * max_steps as f64).ceil() as u64,
        }
    }
}

impl JsonSchema for Warmup {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Warmup".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0})
    }
}

impl Serialize for Warmup {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Warmup::Steps(steps) => steps.serialize(to),
            Warmup::Share(share) => share.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Warmup {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Warmup, D::Error> {
        match Value::deserialize(from)? {
            Value::Integer(steps) if steps >= 0 => Ok(Warmup::Steps(steps as u64)),
            Value::Float(share) if share > 0.0 && share < 1.0 => Ok(Warmup::Share(share)),
            // A number of steps that JSON of other programs writes as a float.
            Value::Float(steps) if steps.fract() == 0.0 && (0.0..1e12).contains(&steps) => {
                Ok(Warmup::Steps(steps as u64))
            }
            other => Err(D::Error::custom(format!(
                "{other} is no number of warm-up steps, and no share of the run's steps from 0 to less than 1"
            ))),
        }
    }
}
