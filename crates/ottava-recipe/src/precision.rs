//! The `[precision]` table of a run, and the recipe that it describes.

use crate::mode::StepPrecision;
use crate::{
    Cast, Exceptions, FirstStep, Fp8Format, KvCacheDtype, LinearCasts, Override, PrecisionOverride, ProductName,
    ProductPrecision, Products, Recipe, RecipeName, Scaling, Steps,
};
use ottava_tensor::ops::{Accumulation, AmaxReducer, CurrentScaling, DelayedScaling, NonFinite};
use ottava_tensor::{DType, Device, Granularity};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The maximum number of tokens up to which wgrad sums fast by default. Fast sums round each addition of 32 products towards zero at 2⁻¹³ of the sum.
/// A sum of values with one sign therefore loses about `tokens / 32 · 2⁻¹⁴` of itself, 3 % for this number of tokens. Sums of both signs lose less
/// (benchmarks/2026-11-27-accumulation-losses.md).
const FAST_WGRAD_TOKENS: usize = 16_384;

/// How FP8 products add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Sums {
    /// Fast in fprop, and in wgrad of at most 16,384 tokens; exact in dgrad, and always with blocks.
    Auto,
    /// [`Accumulation::Fast`].
    Fast,
    /// [`Accumulation::Exact`].
    Exact,
}

/// What shares a scale of `dy` in wgrad, where activations have blocks. The other operand, `x`, has blocks of 1x128 in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WgradBlocks {
    /// 128 tokens of one output, as in DeepSeek-V3 and Transformer Engine.
    #[serde(rename = "1x128")]
    Along,
    /// 128 tokens of 128 outputs: cuBLASLt multiplies these blocks by 1x128 a quarter faster than 1x128 by 1x128.
    #[serde(rename = "128x128")]
    Square,
}

/// How the loss scale of FP16 training moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// The first loss scale.
    pub initial: f64,
    /// The number of consecutive steps with finite gradients after which the loss scale is doubled.
    pub window: u64,
    /// The minimum to which the loss scale is halved.
    pub minimum: f64,
}

/// The names of [`AmaxReducer`] in the schema of a run.
#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
#[expect(dead_code, reason = "only its names are read")]
enum AmaxReducerName {
    Max,
    MostRecent,
}

/// The names of [`NonFinite`] in the schema of a run.
#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
#[expect(dead_code, reason = "only its names are read")]
enum NonFiniteName {
    Quarantine,
    Keep,
}

/// The `[precision.delayed]` table: delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Delayed {
    /// Steps of amax history.
    pub amax_history_len: usize,
    /// How the history is reduced, "max" or "most_recent".
    #[schemars(with = "AmaxReducerName")]
    pub amax_compute_algo: AmaxReducer,
    /// Headroom in powers of two.
    pub margin: i32,
    /// Steps from one computation of a scale to the next.
    pub interval: u32,
    /// How an infinite amax is handled. "quarantine" keeps it out of the history and reports it. "keep" records it, as Transformer Engine
    /// does; the scale then does not change until the infinity has left the history.
    #[schemars(with = "NonFiniteName")]
    pub non_finite: NonFinite,
    /// Scales of the first step, "current" (from the tensor's own amax) or "unscaled" (1, as in Transformer Engine).
    pub first_step: FirstStep,
}

/// The `[precision.fp16]` table: the loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fp16 {
    /// Initial loss scale of "fp16", a power of two. A step with non-finite gradients halves the scale and changes no weight.
    pub initial_loss_scale: f64,
    /// Consecutive steps with finite gradients after which the loss scale doubles.
    pub loss_scale_window: u64,
    /// The loss scale is never halved below this power of two.
    pub min_loss_scale: f64,
}

impl Default for Delayed {
    fn default() -> Delayed {
        Delayed {
            amax_history_len: 1024,
            amax_compute_algo: AmaxReducer::Max,
            margin: 0,
            interval: 1,
            non_finite: NonFinite::Quarantine,
            first_step: FirstStep::Current,
        }
    }
}

impl Default for Fp16 {
    fn default() -> Fp16 {
        Fp16 { initial_loss_scale: 65536.0, loss_scale_window: 2000, min_loss_scale: 1.0 }
    }
}

/// The `[precision.accumulation]` table: how FP8 products add up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AccumulationConfig {
    /// Accumulation of FP8 products in fprop on a GPU: "fast", "exact", or "auto" ("exact" with scales per block, else "fast").
    pub fprop_accumulation: Sums,
    /// Accumulation of FP8 products in dgrad on a GPU: "fast", "exact", or "auto" ("exact").
    pub dgrad_accumulation: Sums,
    /// Accumulation of FP8 products in wgrad on a GPU: "fast", "exact", or "auto". "auto" is "fast" up to 16,384 tokens per micro-batch,
    /// and "exact" with more tokens or with scales per block.
    pub wgrad_accumulation: Sums,
}

/// The `[precision.exceptions]` table: linears, products and steps that compute in BF16.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ExceptionsConfig {
    /// Products that read BF16 operands in all linears: any of "fprop", "dgrad", "wgrad".
    pub high_precision_products: Vec<ProductName>,
    /// Steps that compute all products in BF16 and still update amax histories and scales: "100..200" means steps 100 to 199. Separate several
    /// ranges by commas.
    pub high_precision_steps: Steps,
    /// Linears that stay in BF16: patterns (* and ?) of the Hugging Face names of linears or of modules that contain them, such as
    /// "model.layers.0.*" or "*.down_proj".
    pub high_precision_layers: Vec<String>,
    /// Blocks at the start whose linears stay in BF16.
    pub first_layers_bf16: usize,
    /// Blocks at the end whose linears stay in BF16.
    pub last_layers_bf16: usize,
    /// On a GPU, keep linears in BF16 that FP8 would make slower at the micro-batch size of the run, by measurements on an H200.
    pub skip_slow_linears: bool,
}

impl Default for AccumulationConfig {
    fn default() -> AccumulationConfig {
        let auto = Sums::Auto;
        AccumulationConfig { fprop_accumulation: auto, dgrad_accumulation: auto, wgrad_accumulation: auto }
    }
}

impl Default for ExceptionsConfig {
    fn default() -> ExceptionsConfig {
        ExceptionsConfig {
            high_precision_products: Vec::new(),
            high_precision_steps: Steps::default(),
            high_precision_layers: Vec::new(),
            first_layers_bf16: 0,
            last_layers_bf16: 0,
            skip_slow_linears: true,
        }
    }
}

/// The `[precision]` table of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// "fp32", "bf16", "fp16" (with a loss scale), or an FP8 recipe, named by where its scales come from:
    pub recipe: RecipeName,
    /// FP8 formats: "hybrid" (gradients in E5M2, everything else in E4M3), "e4m3" (everything in E4M3), or "auto" ("hybrid" with one scale
    /// per tensor, "e4m3" with scales per row or block).
    pub fp8_format: Fp8Format,
    /// Round scales down to powers of two. Delayed scaling does not support this.
    pub power_of_two_scales: bool,
    /// How FP8 products add up on a GPU.
    pub accumulation: AccumulationConfig,
    /// With "fp8-block": blocks of dy in wgrad, "128x128" (faster on a GPU) or "1x128" (as in DeepSeek-V3 and Transformer Engine).
    pub wgrad_blocks: WgradBlocks,
    /// Linears, products and steps in BF16.
    pub exceptions: ExceptionsConfig,
    /// Smooth-SwiGLU, for "fp8-delayed" and "fp8-current": scale each input channel of down_proj by a power of two before the cast, and the
    /// weight by its inverse. An outlier in one channel then costs the other channels no precision.
    pub smooth_swiglu: bool,
    /// On a GPU, give each run the same bits. Attention's gradient is summed in a fixed order; without this setting, only sequences that
    /// fit a tile of the library's kernel (64 to 128 tokens) have the same bits in each run. The fixed order takes scratch memory of two
    /// bytes per score, and is slower beyond 1,024 tokens. Products use algorithms that no timing has chosen, which are slower for shapes
    /// that this program does not know.
    pub deterministic: bool,
    /// Compute forward on a GPU so that the result of a token does not depend on the other tokens of a batch, with the order of sums of
    /// `--batch-invariant` in inference. Log-probabilities of a step then have the bits that the same weights give in decoding, so ratios of
    /// reinforcement learning are 1 before the first update. Forward is slower. Backward is not affected.
    pub batch_invariant: bool,
    /// Delayed scaling, for linears with recipe "fp8-delayed".
    pub delayed: Delayed,
    /// The loss scale of recipe "fp16".
    pub fp16: Fp16,
    /// Other formats for some linears: tables `[[precision.overrides]]` with `layers`, patterns as in high_precision_layers, and at least one of
    /// `recipe`, `fp8_format` and `high_precision_products`. The first table that names a linear counts. Example:
    ///
    /// ```toml
    /// [[precision.overrides]]
    /// layers = ["*.down_proj"]
    /// recipe = "fp8-block"
    /// ```
    pub overrides: Vec<PrecisionOverride>,
}

impl Default for Precision {
    fn default() -> Precision {
        Precision {
            recipe: RecipeName::Bf16,
            fp8_format: Fp8Format::Auto,
            power_of_two_scales: false,
            accumulation: AccumulationConfig::default(),
            wgrad_blocks: WgradBlocks::Square,
            exceptions: ExceptionsConfig::default(),
            smooth_swiglu: false,
            deterministic: false,
            batch_invariant: false,
            delayed: Delayed::default(),
            fp16: Fp16::default(),
            overrides: Vec::new(),
        }
    }
}

impl Precision {
    /// Returns a sentence for each problem of these settings.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.delayed.amax_history_len == 0 {
            problems.push("`precision.delayed.amax_history_len` is 0; delayed scaling needs at least 1".to_string());
        }
        if !(0..=8).contains(&self.delayed.margin) {
            problems.push(format!(
                "`precision.delayed.margin` is {}; it is a number of powers of two from 0 to 8",
                self.delayed.margin
            ));
        }
        if !(1..=1 << 20).contains(&self.delayed.interval) {
            problems.push(format!(
                "`precision.delayed.interval` is {}; scales follow every 1 to 1048576 steps",
                self.delayed.interval
            ));
        }
        if matches!(self.recipe, RecipeName::Fp8Block | RecipeName::Mxfp8 | RecipeName::Nvfp4) {
            let sums = [
                self.accumulation.fprop_accumulation,
                self.accumulation.dgrad_accumulation,
                self.accumulation.wgrad_accumulation,
            ];
            for (product, _) in ["fprop", "dgrad", "wgrad"].iter().zip(sums).filter(|(_, sums)| *sums == Sums::Fast) {
                problems.push(format!(
                    "`precision.accumulation.{product}_accumulation` is \"fast\"; products of blocks always add up exactly, so leave it out or write \"exact\""
                ));
            }
        }
        if !self.exceptions.high_precision_steps.is_empty()
            && !self.recipes().any(|recipe| RecipeName::FP8.contains(&recipe))
        {
            problems.push(format!(
                "`precision.exceptions.high_precision_steps` is set, and recipe {} has no step in lower precision; leave it out, or choose an FP8 recipe",
                self.recipe.as_str()
            ));
        }
        if self.power_of_two_scales && self.recipe == RecipeName::Fp8Delayed {
            problems.push(
                "`precision.power_of_two_scales` is not for \"fp8-delayed\", whose scales follow from the amaxes of earlier steps; leave it out, or choose another recipe"
                    .to_string(),
            );
        }
        if self.recipe == RecipeName::Nvfp4 {
            let settings =
                [("power_of_two_scales", self.power_of_two_scales), ("fp8_format", self.fp8_format != Fp8Format::Auto)];
            problems.extend(settings.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| {
                format!("`precision.{key}` is not for \"nvfp4\", whose values are E2M1 and whose scales are E4M3; leave it out, or choose another recipe")
            }));
        }
        if self.smooth_swiglu && !matches!(self.recipe, RecipeName::Fp8Delayed | RecipeName::Fp8Current) {
            problems.push(format!(
                "`precision.smooth_swiglu` is for casts with one scale per tensor, of which recipe {} has none; leave it out, or choose \"fp8-delayed\" or \"fp8-current\"",
                self.recipe.as_str()
            ));
        }
        if self.batch_invariant && self.recipes().any(|recipe| recipe == RecipeName::Fp8Current) {
            problems.push(
                "`precision.batch_invariant` is not for \"fp8-current\", whose scales depend on all tokens of a batch; leave it out, or choose another recipe"
                    .to_string(),
            );
        }
        if self.batch_invariant && self.smooth_swiglu {
            problems.push(
                "`precision.batch_invariant` is not for `precision.smooth_swiglu`, whose scales depend on all tokens of a batch; leave one of them out"
                    .to_string(),
            );
        }
        let powers = [
            ("fp16.initial_loss_scale", self.fp16.initial_loss_scale),
            ("fp16.min_loss_scale", self.fp16.min_loss_scale),
        ];
        for (key, scale) in powers {
            if !(2f64.powi(-30)..=2f64.powi(30)).contains(&scale) || scale.log2().fract() != 0.0 {
                problems
                    .push(format!("`precision.{key}` is {scale}; it is a power of two from 2^-30 to 2^30, as 65536"));
            }
        }
        if self.fp16.initial_loss_scale < self.fp16.min_loss_scale {
            problems.push("`precision.fp16.initial_loss_scale` is less than `min_loss_scale`".to_string());
        }
        if self.fp16.loss_scale_window == 0 {
            problems.push("`precision.fp16.loss_scale_window` is 0; a scale grows after 1 step or more".to_string());
        }
        if self.exceptions.high_precision_layers.iter().any(String::is_empty) {
            problems.push(
                "`precision.exceptions.high_precision_layers` has an empty pattern, which matches nothing".to_string(),
            );
        }
        let overrides = self.overrides.iter().zip(1..);
        problems.extend(overrides.flat_map(|(other, number)| self.problems_of(number, other)));
        problems
    }

    /// Returns the recipes of the linears.
    pub fn recipes(&self) -> impl Iterator<Item = RecipeName> {
        std::iter::once(self.recipe).chain(self.overrides.iter().filter_map(|other| other.recipe))
    }

    /// Returns the data that the products of `step` read.
    pub fn precision_of(&self, step: u64) -> StepPrecision {
        if self.exceptions.high_precision_steps.contains(step) { StepPrecision::High } else { StepPrecision::Recipe }
    }

    /// Returns how the loss is scaled, if the recipe computes in FP16.
    pub fn loss_scaling(&self) -> Option<LossScaling> {
        (self.recipe == RecipeName::Fp16).then_some(LossScaling {
            initial: self.fp16.initial_loss_scale,
            window: self.fp16.loss_scale_window,
            minimum: self.fp16.min_loss_scale,
        })
    }

    /// Returns the recipe that these settings describe on `device`, for micro-batches of this many tokens. `skip_slow_linears` applies only on a GPU,
    /// where speed was measured.
    pub fn recipe_on(&self, device: &Device, micro_batch_tokens: usize) -> Recipe {
        let mut recipe = self.recipe_of(micro_batch_tokens);
        let measured = matches!(device, Device::Cuda(_));
        recipe.exceptions.slow_at = (measured && self.exceptions.skip_slow_linears).then_some(micro_batch_tokens);
        recipe
    }

    /// Returns the recipe that these settings describe, without exceptions for speed, and for few tokens per micro-batch.
    pub fn recipe(&self) -> Recipe {
        self.recipe_of(0)
    }

    fn recipe_of(&self, tokens: usize) -> Recipe {
        let (compute, casts, products) = self.formats(tokens);
        let overrides = self.overrides.iter().map(|other| {
            let precision = self.with(other);
            let (_, casts, products) = precision.formats(tokens);
            Override { patterns: other.layers.clone(), recipe: precision.recipe, casts, products }
        });
        Recipe {
            name: self.recipe,
            compute,
            casts,
            products,
            exceptions: Exceptions {
                patterns: self.exceptions.high_precision_layers.clone(),
                first: self.exceptions.first_layers_bf16,
                last: self.exceptions.last_layers_bf16,
                slow_at: None,
            },
            overrides: overrides.collect(),
            smooth_swiglu: self.smooth_swiglu,
            deterministic: self.deterministic,
            kv_cache_dtype: KvCacheDtype::Auto,
        }
    }

    /// Returns these settings, replaced by the settings that `other` has.
    fn with(&self, other: &PrecisionOverride) -> Precision {
        Precision {
            recipe: other.recipe.unwrap_or(self.recipe),
            fp8_format: other.fp8_format.unwrap_or(self.fp8_format),
            exceptions: ExceptionsConfig {
                high_precision_products: other
                    .high_precision_products
                    .clone()
                    .unwrap_or_else(|| self.exceptions.high_precision_products.clone()),
                ..self.exceptions.clone()
            },
            overrides: Vec::new(),
            ..self.clone()
        }
    }

    /// Returns a sentence for each problem of table number `number` (from 1).
    fn problems_of(&self, number: usize, other: &PrecisionOverride) -> Vec<String> {
        let table = format!("table {number} of [[precision.overrides]]");
        let mut problems = Vec::new();
        if other.layers.is_empty() || other.layers.iter().any(String::is_empty) {
            problems.push(format!("{table} needs `layers`, a list of patterns that are not empty"));
        }
        if (other.recipe, other.fp8_format, &other.high_precision_products) == (None, None, &None) {
            problems.push(format!("{table} changes nothing; set `recipe`, `fp8_format` or `high_precision_products`"));
        }
        if other.recipe == Some(RecipeName::Nvfp4) && other.fp8_format.is_some() {
            problems.push(format!("{table} has recipe nvfp4, whose values are E2M1; leave `fp8_format` out"));
        }
        let is_fp8_or_bf16 = |recipe| !matches!(recipe, RecipeName::Fp32 | RecipeName::Fp16);
        if !is_fp8_or_bf16(self.recipe) {
            problems.push(format!(
                "{table} is set, and recipe {} has no other formats; leave it out, or choose bf16 or an FP8 recipe",
                self.recipe.as_str()
            ));
        }
        if let Some(recipe) = other.recipe.filter(|recipe| !is_fp8_or_bf16(*recipe)) {
            problems.push(format!(
                "{table} has recipe {}, and activations of the run are in BF16; choose bf16 or an FP8 recipe",
                recipe.as_str()
            ));
        }
        problems
    }

    /// Returns the compute type, the casts of linears, and the precision of their products for micro-batches of `tokens`. Exceptions and overrides
    /// are left out.
    fn formats(&self, tokens: usize) -> (DType, Option<LinearCasts>, Products) {
        let how = DelayedScaling {
            reducer: self.delayed.amax_compute_algo,
            margin: self.delayed.margin,
            interval: self.delayed.interval,
            non_finite: self.delayed.non_finite,
        };
        let delayed =
            Scaling::Delayed { how, window: self.delayed.amax_history_len, first_step: self.delayed.first_step };
        let power_of_two = self.power_of_two_scales && self.recipe != RecipeName::Nvfp4;
        let own = Scaling::Current(CurrentScaling { epsilon: 0.0, power_of_two });
        // The granularities are for activations and for weights.
        let (compute, scaling) = match self.recipe {
            RecipeName::Fp32 => (DType::F32, None),
            RecipeName::Bf16 => (DType::BF16, None),
            RecipeName::Fp16 => (DType::F16, None),
            RecipeName::Fp8Delayed => (DType::BF16, Some((delayed, [Granularity::PerTensor; 2]))),
            RecipeName::Fp8Current => (DType::BF16, Some((own, [Granularity::PerTensor; 2]))),
            RecipeName::Fp8Row => (DType::BF16, Some((own, [Granularity::PerRow; 2]))),
            RecipeName::Fp8Block => (DType::BF16, Some((own, [Granularity::Blocks1x128, Granularity::Blocks128x128]))),
            RecipeName::Mxfp8 => (DType::BF16, Some((own, [Granularity::Mx; 2]))),
            RecipeName::Nvfp4 => (DType::BF16, Some((own, [Granularity::Nvfp4, Granularity::Nvfp4Squares]))),
        };
        let casts = scaling.map(|(scaling, [activations, weights])| {
            let gradients = match (self.fp8_format, activations) {
                (_, Granularity::Nvfp4) => DType::E4M3,
                (Fp8Format::Hybrid, _) | (Fp8Format::Auto, Granularity::PerTensor) => DType::E5M2,
                (Fp8Format::E4m3 | Fp8Format::Auto, _) => DType::E4M3,
            };
            let of_gradients = match (self.wgrad_blocks, activations) {
                (WgradBlocks::Square, Granularity::Blocks1x128) => Granularity::MixedBlocks,
                (_, Granularity::Nvfp4) => Granularity::Nvfp4Stochastic,
                (WgradBlocks::Along | WgradBlocks::Square, activations) => activations,
            };
            LinearCasts {
                input: Cast { format: DType::E4M3, granularity: activations, scaling },
                weight: Cast { format: DType::E4M3, granularity: weights, scaling },
                grad_output: Cast { format: gradients, granularity: of_gradients, scaling },
            }
        });
        let blocks = casts.is_some_and(|casts| casts.input.granularity.is_blocks());
        // Fast sums in dgrad may raise losses (benchmarks/2026-11-27-accumulation-losses.md).
        let usual = |name| match name {
            ProductName::Fprop => !blocks,
            ProductName::Dgrad => false,
            ProductName::Wgrad => !blocks && tokens <= FAST_WGRAD_TOKENS,
        };
        let product = |name, sums| match (self.exceptions.high_precision_products.contains(&name), sums) {
            (true, _) => ProductPrecision::High,
            (_, Sums::Fast) => ProductPrecision::Fp8(Accumulation::Fast),
            (_, Sums::Auto) if usual(name) => ProductPrecision::Fp8(Accumulation::Fast),
            (_, Sums::Auto | Sums::Exact) => ProductPrecision::Fp8(Accumulation::Exact),
        };
        let products = Products {
            fprop: product(ProductName::Fprop, self.accumulation.fprop_accumulation),
            dgrad: product(ProductName::Dgrad, self.accumulation.dgrad_accumulation),
            wgrad: product(ProductName::Wgrad, self.accumulation.wgrad_accumulation),
        };
        (compute, casts, products)
    }
}
