//! The table `[lora]`.

use crate::pairs::Pairs;
use ottava_recipe::lora::{Exceptions, Lora, Targets};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The `[lora]` table: adapters beside the linears of a frozen model, as PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank of the adapters that are trained instead of the model, as in PEFT: y = x Wᵀ + (lora_alpha / r) (x Aᵀ) Bᵀ. 0 trains all weights.
    /// Adapters need init = "pretrained" and no offloading. Frozen weights are cast to FP8 once, when they are loaded, take one byte with
    /// scales per tensor or 128x128 block, and have no gradients, master weights or moments.
    pub r: usize,
    /// Numerator of the adapters' factor, lora_alpha / r.
    pub lora_alpha: f64,
    /// Linears that have adapters: "all-linear" (all of the blocks), a list of names, such as ["q_proj", "v_proj"], or a regular expression of
    /// whole names, such as ".*(q|v)_proj".
    pub target_modules: Targets,
    /// Linears among them that have none: a list of names, or a regular expression of whole names.
    pub exclude_modules: Targets,
    /// Numbers of the layers whose linears have adapters, beside a list of names in target_modules; [] for all.
    pub layers_to_transform: Vec<usize>,
    /// Names before the numbers of layers, such as ["layers"]; [] for any.
    pub layers_pattern: Vec<String>,
    /// Other ranks than r, by regular expressions of the ends of names: { q_proj = 8 }, for example.
    pub rank_pattern: Pairs<usize>,
    /// Other values than lora_alpha, likewise: { q_proj = 32.0 }, for example.
    pub alpha_pattern: Pairs<f64>,
    /// Dropout before adapters; only 0 is implemented.
    pub lora_dropout: f64,
    /// Whether the factor is lora_alpha / sqrt(r) (rsLoRA).
    pub use_rslora: bool,
    /// Whether adapters also have a trained magnitude for each output (DoRA): the output is multiplied by magnitude / norm of the row of W +
    /// lora_alpha / r · B A. A step takes longer.
    pub use_dora: bool,
    /// A PEFT folder (a checkpoint of adapters is one) with the adapters that the run starts from; "" makes new ones. If model.path is such a
    /// folder, the run starts from it and loads the base that it names. If r is 0, r, lora_alpha, use_rslora, use_dora, the targets and the
    /// patterns are the adapter's; otherwise all but the targets must equal the adapter's.
    pub init_from: PathBuf,
}

impl Default for LoraConfig {
    fn default() -> LoraConfig {
        LoraConfig {
            r: 0,
            lora_alpha: 16.0,
            target_modules: Targets::AllLinear,
            exclude_modules: Targets::NONE,
            layers_to_transform: Vec::new(),
            layers_pattern: Vec::new(),
            rank_pattern: Pairs::default(),
            alpha_pattern: Pairs::default(),
            lora_dropout: 0.0,
            use_rslora: false,
            use_dora: false,
            init_from: PathBuf::new(),
        }
    }
}

impl LoraConfig {
    /// The adapters; `None` where all weights are trained.
    pub fn adapters(&self) -> Option<Lora> {
        let LoraConfig { r, lora_alpha: alpha, use_rslora, use_dora, .. } = *self;
        let exceptions = self.exceptions();
        (r > 0).then(|| Lora { r, alpha, use_rslora, use_dora, targets: self.target_modules.clone(), exceptions })
    }

    /// What the table says of single linears and layers.
    pub fn exceptions(&self) -> Exceptions {
        Exceptions {
            exclude: self.exclude_modules.clone(),
            layers: self.layers_to_transform.clone(),
            layers_pattern: self.layers_pattern.clone(),
            ranks: self.rank_pattern.0.iter().cloned().collect(),
            alphas: self.alpha_pattern.0.iter().cloned().collect(),
        }
    }

    /// Sentences about entries of `rank_pattern` and `alpha_pattern` that are none.
    pub(super) fn pattern_problems(&self) -> Vec<String> {
        let ranks = self.rank_pattern.0.iter().filter(|(pattern, rank)| pattern.is_empty() || *rank == 0);
        let alphas = self.alpha_pattern.0.iter();
        let alphas = alphas.filter(|(pattern, alpha)| pattern.is_empty() || !alpha.is_finite() || *alpha <= 0.0);
        let ranks = ranks.map(|(pattern, rank)| {
            format!("`lora.rank_pattern` has {rank} for \"{pattern}\"; it is a pattern with a rank from 1 up")
        });
        let alphas = alphas.map(|(pattern, alpha)| {
            format!("`lora.alpha_pattern` has {alpha} for \"{pattern}\"; it is a pattern with a number above 0")
        });
        ranks.chain(alphas).collect()
    }

    /// This table with the settings of `lora`.
    pub fn with(self, lora: Lora) -> LoraConfig {
        let Lora { r, alpha, use_rslora, use_dora, targets, exceptions } = lora;
        let Exceptions { exclude, layers, layers_pattern, ranks, alphas } = exceptions;
        LoraConfig {
            r,
            lora_alpha: alpha,
            use_rslora,
            use_dora,
            target_modules: targets,
            exclude_modules: exclude,
            layers_to_transform: layers,
            layers_pattern,
            rank_pattern: Pairs(ranks.into_iter().collect()),
            alpha_pattern: Pairs(alphas.into_iter().collect()),
            ..self
        }
    }
}
