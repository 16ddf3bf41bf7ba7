//! LoRA settings: which linears have adapters, and the rank and scale of the adapters. Hu et al. 2021, arXiv:2106.09685.
//!
//! With adapters (`Builder::lora`), all other parameters are frozen, and no gradient of a frozen weight is computed. `Decoder::parameters` leaves
//! frozen parameters out, so optimizer, ranks and checkpoints never see them, and layers check `Param::is_trained` before they compute a gradient.
//!
//! The low-rank product of an adapter is the addend of the linear's own product, in fprop (`Adapter::forward`) and in dgrad (`Adapter::dgrad`), so
//! the sum is rounded once. An adapter reads operands in the compute type: `OperandCast::for_adapter` keeps the value in addition to the codes
//! (`View::CodesAndValue`), and `Decision::beside_adapters` keeps wgrad in high precision, so backward gets values. For the parts of a fused
//! weight, the matrices `A` are stacked, and the matrices `B` form a block-diagonal matrix.
//!
//! `AdaptedWeights` (`checkpoint/model.rs`) returns the weights of base and adapter. A model for inference can have several adapters if it is built
//! with adapters of no linear (`Lora::of_no_linear`): `Decoder::load_adapters` builds each adapter, and `Decoder::exchange_adapters` moves one
//! adapter into the linears. Forward reads only this adapter.
//!
//! `modules_to_save` names modules without linears, such as the embedding, the head and norms. `Param::new` trains the parameters of these modules
//! and gives their tensors PEFT's names (`PEFT_PREFIX`), so optimizer, ranks and checkpoints treat them like matrices of adapters.
//!
//! Experts and routers have adapters too. Transformers has the matrices of all experts of a layer as one parameter, an [`ExpertParameter`], whose
//! adapter is a `GroupedAdapter` (`layers/moe/adapter.rs`): grouped products with the matrices `A` and `B` of each expert. `parameters.rs` decides which
//! parameters have adapters, and `checkpoint/expert_adapters.rs` knows their layout in PEFT's files.
//!
//! To add a variant of LoRA, change `Adapter` (`layers/linear/adapter.rs`), the products of a linear if the variant affects them
//! (`layers/linear/magnitudes.rs` does this for DoRA), `Lora`, the keys in `settings/lora.rs`, and `adapter_config` in `checkpoint/model.rs`. A layer
//! with linears implements `Sublayer::linears_mut`, which visits each layer that is `Adaptable`.

mod modules;
mod parameters;
mod targets;
#[cfg(test)]
mod tests;

use ottava_common::error::Result;
use std::borrow::Cow;

pub use modules::{Modules, is_of_adapter, module_of};
pub use parameters::{ExpertParameter, ExpertRank, RouterParameter, parameter_names};
pub use targets::{Exceptions, Pattern, Targets, last_name};

/// The prefix that PEFT adds to the names of linears and of tensors that are trained and saved with the adapters.
pub const PEFT_PREFIX: &str = "base_model.model.";

/// The end of the name of the magnitudes of an adapter.
pub const MAGNITUDE: &str = "lora_magnitude_vector";

/// Adapters of the linears of a model: `y = x · Wᵀ + scale · (x · Aᵀ) · Bᵀ` with `A` `[r, K]` and `B` `[N, r]`. Names and meanings are PEFT's. With
/// `use_dora`, each output is also multiplied by its magnitude over the norm of its row of `W + scale · B · A`. All other weights are frozen.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// The rank of the adapters.
    pub r: usize,
    /// The numerator of the scale.
    pub alpha: f64,
    /// The probability with which training sets an element of an adapter's input to 0.
    pub dropout: f64,
    /// The factor of the learning rate of `B` (LoRA+: Hayou, Ghosh and Yu 2024, arXiv:2402.12354).
    pub b_rate: f64,
    /// Whether the scale is `alpha / sqrt(r)` (Kalajdzievski 2023, arXiv:2312.03732), instead of `alpha / r`.
    pub use_rslora: bool,
    /// Whether adapters also have magnitudes (DoRA: Liu et al. 2024, arXiv:2402.09353).
    pub use_dora: bool,
    /// The linears that have adapters.
    pub targets: Targets,
    /// The parameters that have adapters, by the ends of their names: stacked matrices of experts (`mlp.experts.gate_up_proj`), or weights of linears and
    /// routers (`mlp.gate.weight`).
    pub parameters: Vec<String>,
    /// Whether `targets` also select experts and routers, by the names that their linears had before transformers 5, if PEFT translates these names. If
    /// not, only `parameters` select them.
    pub experts_by_name: bool,
    /// The linears and layers without adapters, or with another rank or `alpha`.
    pub exceptions: Exceptions,
    /// The modules that are trained whole beside the adapters, by the ends of their names. They have no linears.
    pub modules_to_save: Vec<String>,
}

impl Default for Lora {
    /// Returns PEFT's defaults, with adapters of all linears.
    fn default() -> Lora {
        let (targets, exceptions) = (Targets::AllLinear, Exceptions::default());
        Lora {
            r: 8,
            alpha: 8.0,
            dropout: 0.0,
            b_rate: 1.0,
            use_rslora: false,
            use_dora: false,
            targets,
            parameters: Vec::new(),
            experts_by_name: true,
            exceptions,
            modules_to_save: Vec::new(),
        }
    }
}

impl Lora {
    /// Returns adapters of no linear, for a model that gets its adapters later.
    pub fn of_no_linear() -> Lora {
        Lora { r: 1, alpha: 1.0, targets: Targets::NONE, ..Lora::default() }
    }

    /// Returns whether the linear called `linear` has an adapter.
    pub fn has(&self, linear: &str) -> bool {
        self.has_linear(linear) || !self.parameters.is_empty() && self.has_parameter(&format!("{linear}.weight"))
    }

    /// Returns whether `target_modules` and the exceptions select the linear called `linear`.
    fn has_linear(&self, linear: &str) -> bool {
        let is_target = match &self.targets {
            // A whole name identifies one layer, so the list of layers does not apply.
            Targets::Names(names) if names.iter().any(|name| name == linear) => true,
            targets => targets.names(linear) && self.exceptions.has_layer(linear),
        };
        is_target && !self.exceptions.exclude.names(linear)
    }

    /// Returns whether the module called `module` is trained whole beside the adapters. As in PEFT, an entry matches the end of a name, also inside a
    /// word: `norm` matches `input_layernorm`.
    pub fn saves(&self, module: &str) -> bool {
        self.modules_to_save.iter().any(|end| module.ends_with(end))
    }

    /// Returns the name of `linear` that patterns of ranks and factors match: the name of its weight if only `parameters` select the linear.
    fn pattern_name<'a>(&self, linear: &'a str) -> Cow<'a, str> {
        let weight = || format!("{linear}.weight");
        match self.parameters.is_empty() || self.has_linear(linear) || !self.has_parameter(&weight()) {
            true => Cow::Borrowed(linear),
            false => Cow::Owned(weight()),
        }
    }

    /// Returns the rank of the adapter of `linear`.
    pub fn rank(&self, linear: &str) -> usize {
        Exceptions::of(&self.exceptions.ranks, &self.pattern_name(linear)).unwrap_or(self.r)
    }

    /// Returns the numerator of the factor of the product of `A` and `B` of `linear`.
    pub fn alpha(&self, linear: &str) -> f64 {
        Exceptions::of(&self.exceptions.alphas, &self.pattern_name(linear)).unwrap_or(self.alpha)
    }

    /// Returns the factor of the product of `A` and `B` of `linear`.
    pub fn scale(&self, linear: &str) -> f64 {
        self.factor(self.alpha(linear), self.rank(linear))
    }

    /// Returns the factor of the product of matrices of this rank, with `alpha` as its numerator.
    fn factor(&self, alpha: f64, rank: usize) -> f64 {
        let r = rank as f64;
        alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// Checks the targets against the names of all linears of a model that can have adapters, and the modules to save against its `modules`.
    ///
    /// Errors with [`Error::Config`](ottava_common::Error::Config), which lists the linears or modules, if a target is not a linear of the model, or
    /// if a module to save does not exist or has linears.
    pub fn check<'a>(&self, linears: impl Iterator<Item = &'a String>, modules: &Modules) -> Result<()> {
        let linears: Vec<&String> = linears.collect();
        if let Some(problem) = modules.problem(&self.modules_to_save) {
            return Err(ottava_common::Error::Config(format!("`modules_to_save`: {problem}")));
        }
        let known = || targets::last_names(linears.iter().copied());
        if let Some(problem) = self.targets.problem(&linears) {
            return Err(targets::error(&problem, &known()));
        }
        if let Some(problem) = self.exceptions.problem(&linears) {
            return Err(ottava_common::Error::Config(problem));
        }
        let is_empty = matches!(&self.targets, Targets::Names(names) if names.is_empty());
        match is_empty || linears.iter().any(|linear| self.has(linear)) {
            true => Ok(()),
            false => Err(targets::error("no linear of this model's blocks is left as a target", &known())),
        }
    }
}
