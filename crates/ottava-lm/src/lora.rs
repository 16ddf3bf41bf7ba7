//! LoRA as a value: which linears have adapters, of which rank and scale. Hu et al. 2021, arXiv:2106.09685.

use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;

/// The word for all linears of the blocks.
const ALL_LINEAR: &str = "all-linear";

/// PEFT's prefix of the name of a linear, and of a tensor that is trained and saved beside adapters.
pub const PEFT_PREFIX: &str = "base_model.model.";

/// The end of the name of the magnitudes of an adapter.
pub const MAGNITUDE: &str = "lora_magnitude_vector";

/// Adapters beside the linears of a model: `y = x · Wᵀ + scale · (x · Aᵀ) · Bᵀ` with `A` `[r, K]` and `B` `[N, r]`, under the names
/// and with the meaning of PEFT; with `use_dora`, each output is also multiplied by its magnitude over the norm of its row of
/// `W + scale · B · A`. Everything else is frozen.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rank of the adapters.
    pub r: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Whether the scale is `alpha / sqrt(r)` (Kalajdzievski 2023, arXiv:2312.03732), instead of `alpha / r`.
    pub use_rslora: bool,
    /// Whether adapters also have magnitudes (DoRA: Liu et al. 2024, arXiv:2402.09353).
    pub use_dora: bool,
    /// The linears that have adapters.
    pub targets: Targets,
}

/// Which linears have adapters.
#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// All of the blocks: `"all-linear"`.
    AllLinear,
    /// Those called so, or whose names end in a dot and one of these: `["q_proj", "v_proj"]`.
    Names(Vec<String>),
}

impl Lora {
    /// Adapters of no linear: those of a model that is built as beside adapters, and gets them later.
    pub fn of_no_linear() -> Lora {
        Lora { r: 1, alpha: 1.0, use_rslora: false, use_dora: false, targets: Targets::Names(Vec::new()) }
    }

    /// The factor of the product of `A` and `B`.
    pub fn scale(&self) -> f64 {
        self.alpha / if self.use_rslora { (self.r as f64).sqrt() } else { self.r as f64 }
    }

    /// Checks the targets against the names of all linears of a model.
    ///
    /// Errors with [`Error::Config`] that lists the linears when a target is none of them.
    pub fn check<'a>(&self, linears: impl Iterator<Item = &'a String>) -> Result<()> {
        let Targets::Names(targets) = &self.targets else { return Ok(()) };
        let linears: Vec<&String> = linears.collect();
        let Some(unknown) = targets.iter().find(|target| !linears.iter().any(|linear| names_it(target, linear))) else {
            return Ok(());
        };
        let known: BTreeSet<&str> = linears.iter().map(|linear| last_name(linear)).collect();
        let known: Vec<String> = known.into_iter().map(|name| format!("`{name}`")).collect();
        Err(Error::Config(format!(
            "`lora.target_modules`: `{unknown}` is no linear of this model's blocks, which are {}; \
             name some of them, or write \"{ALL_LINEAR}\"",
            known.join(", ")
        )))
    }
}

impl Targets {
    /// Whether the linear called `linear` has an adapter.
    pub fn names(&self, linear: &str) -> bool {
        match self {
            Targets::AllLinear => true,
            Targets::Names(targets) => targets.iter().any(|target| names_it(target, linear)),
        }
    }
}

fn names_it(target: &str, linear: &str) -> bool {
    linear.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The part of a name after its last dot.
pub fn last_name(linear: &str) -> &str {
    linear.rsplit('.').next().unwrap_or(linear)
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Targets::AllLinear => ALL_LINEAR.serialize(to),
            Targets::Names(names) => names.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Targets, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "\"all-linear\" or a list of names of linears")]
        enum Written {
            Word(String),
            Names(Vec<String>),
        }
        match Written::deserialize(from)? {
            Written::Word(word) if word == ALL_LINEAR => Ok(Targets::AllLinear),
            Written::Word(word) => Err(serde::de::Error::custom(format!(
                "`target_modules` is \"{word}\"; write \"{ALL_LINEAR}\", or a list of names, as [\"q_proj\", \"v_proj\"]"
            ))),
            Written::Names(names) => Ok(Targets::Names(names)),
        }
    }
}
