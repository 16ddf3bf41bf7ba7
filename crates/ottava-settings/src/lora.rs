//! The table `[lora]`.

use crate::pairs::Pairs;
use ottava_recipe::lora::{Exceptions, Lora, Targets};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The `[lora]` table: adapters beside the linears of a frozen model, like PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank of the adapters that are trained instead of the model, as in PEFT: y = x Wᵀ + (lora_alpha / r) (x Aᵀ) Bᵀ. 0 trains all weights.
    /// Adapters need init = "pretrained" and no offloading. Frozen weights are cast to FP8 once, when they are loaded; with scales per
    /// tensor or per 128x128 block, a frozen weight takes one byte. Frozen weights have no gradients, master weights or moments.
    pub r: usize,
    /// Numerator of the adapters' factor lora_alpha / r.
    pub lora_alpha: f64,
    /// Linears that have adapters: "all-linear" (all linears of the blocks), a list of names, such as ["q_proj", "v_proj"], or a regular
    /// expression of whole names, such as ".*(q|v)_proj".
    pub target_modules: Targets,
    /// Parameters that have adapters, by the ends of their names in transformers, as in PEFT: stacked matrices of experts, such as
    /// ["experts.gate_up_proj", "experts.down_proj"], and weights of routers, such as ["gate.weight"]. As in PEFT, target_modules also selects experts and
    /// routers of many models; the rank of gate and up is then 2 r.
    pub target_parameters: Vec<String>,
    /// Linears of target_modules that have no adapters: a list of names, or a regular expression of whole names.
    pub exclude_modules: Targets,
    /// Numbers of the layers whose linears have adapters, if target_modules is a list of names; [] means all layers.
    pub layers_to_transform: Vec<usize>,
    /// Names before the numbers of layers, such as ["layers"]; [] means any name.
    pub layers_pattern: Vec<String>,
    /// Modules without linears that are trained whole and saved with the adapters, by the ends of their names, as in PEFT: the embedding, the head and
    /// norms. Example: ["embed_tokens", "lm_head"]. If the head shares the weight of the embedding, naming one of them gives each a weight of its
    /// own, as in PEFT.
    pub modules_to_save: Vec<String>,
    /// Values that replace r for linears whose names end with a match of a regular expression. Example: { q_proj = 8 }.
    pub rank_pattern: Pairs<usize>,
    /// Values that replace lora_alpha for linears whose names end with a match of a regular expression. Example: { q_proj = 32.0 }.
    pub alpha_pattern: Pairs<f64>,
    /// Probability with which training sets an element of an adapter's input to 0, as in PEFT. The linears of q, k and v share a mask, and so do gate
    /// and up. Masks follow from the seed and the step, so a resumed run draws the same masks.
    pub lora_dropout: f64,
    /// Factor of the learning rate of the adapters' matrices B (LoRA+). A common value is 16.
    pub loraplus_lr_ratio: f64,
    /// Whether the frozen matrices of the blocks are stored in four bits (QLoRA): NF4 in blocks of 64, with quantized scales, as in bitsandbytes.
    /// A weight takes 0.52 bytes. Each product dequantizes its weight first, which takes time. Not with parallel.zero = 3, parallel.tensor
    /// above 1 or use_dora.
    pub load_in_4bit: bool,
    /// Whether the factor of the adapters is lora_alpha / sqrt(r) (rsLoRA).
    pub use_rslora: bool,
    /// Whether adapters also have a trained magnitude for each output (DoRA): each output is multiplied by its magnitude and divided by the
    /// norm of its row of W + lora_alpha / r · B A. A step takes longer with DoRA.
    pub use_dora: bool,
    /// A PEFT folder, such as a checkpoint of adapters, with the adapters that the run starts from; "" creates new adapters. If model.path is a PEFT
    /// folder, the run starts from that folder and loads the base model that the folder names. If r is 0, then r, lora_alpha, use_rslora, use_dora,
    /// the targets and the patterns are read from the folder. Otherwise, all of these settings except the targets must equal the settings of the
    /// folder.
    pub init_from: PathBuf,
}

impl Default for LoraConfig {
    fn default() -> LoraConfig {
        LoraConfig {
            r: 0,
            lora_alpha: 16.0,
            target_modules: Targets::AllLinear,
            target_parameters: Vec::new(),
            exclude_modules: Targets::NONE,
            layers_to_transform: Vec::new(),
            layers_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            rank_pattern: Pairs::default(),
            alpha_pattern: Pairs::default(),
            lora_dropout: 0.0,
            loraplus_lr_ratio: 1.0,
            load_in_4bit: false,
            use_rslora: false,
            use_dora: false,
            init_from: PathBuf::new(),
        }
    }
}

impl LoraConfig {
    /// Returns the adapters; `None` if all weights are trained.
    pub fn adapters(&self) -> Option<Lora> {
        let LoraConfig { r, lora_alpha: alpha, lora_dropout: dropout, loraplus_lr_ratio: b_rate, .. } = *self;
        let LoraConfig { use_rslora, use_dora, .. } = *self;
        let (targets, exceptions) = (self.target_modules.clone(), self.exceptions());
        let modules_to_save = self.modules_to_save.clone();
        (r > 0).then_some(Lora {
            r,
            alpha,
            dropout,
            b_rate,
            use_rslora,
            use_dora,
            targets,
            parameters: self.target_parameters.clone(),
            exceptions,
            modules_to_save,
            ..Lora::default()
        })
    }

    /// Returns whether the model without its adapters is the model that the run starts from: adapters are new, and no module is trained whole.
    pub fn keeps_base(&self) -> bool {
        self.r > 0 && self.init_from.as_os_str().is_empty() && self.modules_to_save.is_empty()
    }

    /// Returns the settings for single linears and layers.
    pub fn exceptions(&self) -> Exceptions {
        Exceptions {
            exclude: self.exclude_modules.clone(),
            layers: self.layers_to_transform.clone(),
            layers_pattern: self.layers_pattern.clone(),
            ranks: self.rank_pattern.0.iter().cloned().collect(),
            alphas: self.alpha_pattern.0.iter().cloned().collect(),
        }
    }

    /// Lists invalid entries of `rank_pattern` and `alpha_pattern`, one sentence each.
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

    /// Returns this table with the settings of `lora` that a folder of adapters decides: all except the dropout and the learning rates.
    pub fn with(self, lora: Lora) -> LoraConfig {
        let Lora { r, alpha, use_rslora, use_dora, targets, parameters, exceptions, modules_to_save, .. } = lora;
        let Exceptions { exclude, layers, layers_pattern, ranks, alphas } = exceptions;
        LoraConfig {
            r,
            lora_alpha: alpha,
            use_rslora,
            use_dora,
            target_modules: targets,
            target_parameters: parameters,
            exclude_modules: exclude,
            layers_to_transform: layers,
            layers_pattern,
            modules_to_save,
            rank_pattern: Pairs(ranks.into_iter().collect()),
            alpha_pattern: Pairs(alphas.into_iter().collect()),
            ..self
        }
    }
}
