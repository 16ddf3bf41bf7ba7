//! The decision of a recipe for each linear, which building and planning share.

use crate::{Exceptions, Fp8Pays, LinearCasts, ProductPrecision, Products, Recipe, Scaling};
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{AmaxReducer, CurrentScaling};
use ottava_tensor::{Granularity, GranularityInfo, QuantizedTensor};

/// A linear and its place in a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSite {
    /// The name in the scaling state, such as `model.layers.0.self_attn.qkv_proj`.
    pub name: String,
    /// Hugging Face's names of the linear's parts. One decision applies to all parts.
    pub parts: Vec<String>,
    /// The number of outputs, `N`.
    pub outputs: usize,
    /// The number of inputs, `K`.
    pub inputs: usize,
    /// The index of the block, and the number of blocks. `None` for a linear outside of blocks.
    pub block: Option<(usize, usize)>,
    /// Whether the input is the output of SwiGLU.
    pub after_swiglu: bool,
    /// Whether ranks of tensor parallelism divide the inputs instead of the outputs.
    pub divides_inputs: bool,
    /// The experts whose matrices the linear stacks. `None` for a single matrix.
    pub experts: Option<ExpertCounts>,
}

/// The numbers of experts of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    /// The number of experts.
    pub count: usize,
    /// The number of experts that a token is sent to.
    pub chosen: usize,
}

impl LinearSite {
    /// Returns the number of matrices `[outputs, inputs]`, and the number of matrices that a token is multiplied by.
    pub fn matrices(&self) -> [usize; 2] {
        self.experts.map_or([1; 2], |ExpertCounts { count, chosen }| [count, chosen])
    }

    /// Returns the number of rows of the product for a micro-batch of `tokens`. One launch computes the rows of all experts.
    pub fn rows(&self, tokens: usize) -> usize {
        tokens * self.matrices()[1]
    }

    /// Returns why stacked matrices cannot be cast by `casts`, if a block of scales or padding would span two matrices.
    fn uncuttable(&self, casts: &LinearCasts) -> Option<String> {
        self.experts?;
        if casts.weight.granularity.has_tensor_scale() {
            return Some(format!("experts have no products with {} scales", casts.weight.granularity));
        }
        let (outputs, block) = (self.outputs, casts.weight.granularity.block().unwrap_or(QuantizedTensor::PAD));
        let cut = || format!("the {outputs} outputs of an expert are no whole blocks of {block}");
        (!outputs.is_multiple_of(block)).then(cut)
    }

    /// Returns the name after the number of the block, such as `self_attn.qkv_proj`.
    pub fn name_in_block(&self) -> &str {
        match self.block.and_then(|(block, _)| self.name.split_once(&format!(".{block}."))) {
            Some((_, name)) => name,
            None => &self.name,
        }
    }

    /// Returns the name with `which` in place of the number of the block.
    pub fn name_in_blocks(&self, which: &str) -> String {
        match self.block.and_then(|(block, _)| self.name.split_once(&format!(".{block}."))) {
            Some((blocks, name)) => format!("{blocks}.{which}.{name}"),
            None => self.name.clone(),
        }
    }
}

/// The decision of a recipe for a linear.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The casts and the precision of the products. `None` leaves the linear in the compute type.
    pub fp8: Option<(LinearCasts, Products)>,
    /// Whether Smooth-SwiGLU scales the columns of the input, and the columns of the weight inversely.
    pub smooth: bool,
    /// The reason for the decision, for a plan.
    pub reason: String,
}

impl Decision {
    /// Returns the decision for a linear that no recipe casts, for this `reason`.
    pub fn uncast(reason: &str) -> Decision {
        plain(reason.into())
    }

    /// Changes the decision for a linear of a model that is frozen beside adapters. No product computes the gradient of its weight, and
    /// adapters read its operands in the compute type. Its weight is cast once, by its own amax: a history would contain the same amax.
    pub fn beside_adapters(&mut self) {
        if let Some((casts, products)) = &mut self.fp8 {
            products.wgrad = ProductPrecision::High;
            cast_once(casts);
            self.reason += "; frozen beside adapters: W is cast once, by its own amax";
        }
    }

    /// Changes the decision for a frozen weight without an adapter: the weight is cast once, by its own amax.
    pub fn frozen(&mut self) {
        if let Some((casts, _)) = &mut self.fp8 {
            cast_once(casts);
            self.reason += "; frozen: W is cast once, by its own amax, and has no wgrad";
        }
    }
}

/// Replaces delayed scaling of the weight by current scaling, since the amax of a frozen weight does not change.
fn cast_once(casts: &mut LinearCasts) {
    if let Scaling::Delayed { .. } = casts.weight.scaling {
        casts.weight.scaling = Scaling::Current(CurrentScaling::default());
    }
}

impl Recipe {
    /// Decides for the linear at `site`.
    ///
    /// Errors when patterns match only some of its parts: the parts are one product.
    pub fn decide(&self, site: &LinearSite) -> Result<Decision> {
        let Exceptions { ref patterns, first, last, slow_at } = self.exceptions;
        let exception = matched(site, HIGH_PRECISION_LAYERS, patterns)?;
        let (mut by, mut name, mut casts, mut products) = (String::new(), self.name, self.casts, self.products);
        for other in &self.overrides {
            if matched(site, OVERRIDES, &other.patterns)?.is_some() {
                (by, name, casts, products) = (other.reason(), other.recipe, other.casts, other.products);
                break;
            }
        }
        let Some(mut casts) = casts else {
            return Ok(plain(format!("{by}recipe {} casts nothing to FP8", name.as_str())));
        };
        if let Some(pattern) = exception {
            return Ok(plain(format!("`{pattern}` of high_precision_layers")));
        }
        if let Some((index, count)) = site.block {
            if index < first {
                return Ok(plain(format!("first_layers_bf16 = {first}")));
            }
            if index + last >= count {
                return Ok(plain(format!("last_layers_bf16 = {last}")));
            }
        }
        let is_slow = |tokens: usize| !Fp8Pays::for_casts(&casts).holds(site.rows(tokens), site.outputs, site.inputs);
        let is_emulated = casts.input.granularity.microscaling().is_some();
        if let Some(tokens) = slow_at.filter(|&tokens| !is_emulated && is_slow(tokens)) {
            return Ok(plain(format!("skip_slow_linears: at {tokens} tokens FP8 is slower than {}", self.compute)));
        }
        if let Some(reason) = site.uncuttable(&casts) {
            return Ok(plain(reason));
        }
        if products == Products::HIGH {
            return Ok(plain(format!("{by}high_precision_products names all three")));
        }
        let mut reason = format!("{by}recipe {}: {}", name.as_str(), scaling(&casts));
        let Products { fprop, dgrad, wgrad } = products;
        let smooth = self.smooth_swiglu
            && site.after_swiglu
            && casts.input.granularity == Granularity::PerTensor
            && ![fprop, dgrad, wgrad].contains(&ProductPrecision::High);
        if smooth {
            reason += "; smooth_swiglu: first each channel of x by a power of two and W by the inverse, so W is cast in each micro-batch";
            if let Scaling::Delayed { .. } = casts.weight.scaling {
                // The scaled weight depends on the activations of a micro-batch, so a history does not predict its amax.
                casts.weight.scaling = Scaling::Current(CurrentScaling::default());
                reason += ", by its own amax";
            }
        }
        Ok(Decision { fp8: Some((casts, products)), smooth, reason })
    }

    /// Checks the exceptions and overrides against all linears of a model. `fixed` are the names of linears that are never cast.
    ///
    /// Errors when a pattern matches nothing.
    pub fn check<'a>(
        &self,
        sites: impl IntoIterator<Item = &'a LinearSite, IntoIter: Clone>,
        fixed: &[String],
    ) -> Result<()> {
        let mut sites = sites.into_iter();
        let exceptions = self.exceptions.patterns.iter().map(|pattern| (HIGH_PRECISION_LAYERS, fixed, pattern));
        let overrides = self.overrides.iter().flat_map(|other| &other.patterns);
        for (key, fixed, pattern) in exceptions.chain(overrides.map(|pattern| (OVERRIDES, &[][..], pattern))) {
            let mut names = sites.clone().flat_map(|site| site.parts.iter().chain([&site.name]));
            if !names.any(|name| names_it(pattern, name)) && !fixed.iter().any(|name| names_it(pattern, name)) {
                let like = sites.next().and_then(|site| site.parts.first());
                return Err(Error::Config(format!(
                    "`{key}`: `{pattern}` matches no linear of this model{}",
                    like.map_or(String::new(), |name| format!("; the first is called `{name}`"))
                )));
            }
        }
        Ok(())
    }
}

/// The configuration keys that hold patterns.
const HIGH_PRECISION_LAYERS: &str = "precision.exceptions.high_precision_layers";
const OVERRIDES: &str = "precision.overrides";

/// Returns the first of `patterns` that matches the linear at `site`. If only parts match, all parts must match. `key` names the patterns in errors.
fn matched<'a>(site: &LinearSite, key: &str, patterns: &'a [String]) -> Result<Option<&'a str>> {
    if let Some(pattern) = patterns.iter().find(|pattern| names_it(pattern, &site.name)) {
        return Ok(Some(pattern));
    }
    let (mut first, mut left) = (None, Vec::new());
    for part in &site.parts {
        match patterns.iter().find(|pattern| names_it(pattern, part)) {
            Some(pattern) => first = first.or(Some((pattern, part))),
            None => left.push(format!("`{part}`")),
        }
    }
    match first {
        Some((pattern, part)) if !left.is_empty() => Err(Error::Config(format!(
            "`{key}`: `{pattern}` matches `{part}` and nothing matches {}; they are one product with one format: name all of them, or none",
            left.join(" and ")
        ))),
        first => Ok(first.map(|(pattern, _)| pattern.as_str())),
    }
}

fn plain(reason: String) -> Decision {
    Decision { fp8: None, smooth: false, reason }
}

/// Returns whether `pattern` matches the linear called `name`, its weight, or a module around it.
fn names_it(pattern: &str, name: &str) -> bool {
    let around = name.match_indices('.').map(|(dot, _)| &name[..dot]);
    around.chain([name]).any(|name| glob(pattern, name)) || glob(pattern, &format!("{name}.weight"))
}

/// Returns whether `text` matches `pattern`. `*` matches any number of characters, and `?` matches one character.
pub fn glob(pattern: &str, text: &str) -> bool {
    match pattern.chars().next() {
        None => text.is_empty(),
        Some('*') => text
            .char_indices()
            .map(|(i, _)| i)
            .chain([text.len()])
            .any(|i| glob(pattern.trim_start_matches('*'), &text[i..])),
        Some(wanted) => match text.chars().next() {
            Some(c) if wanted == '?' || wanted == c => glob(&pattern[wanted.len_utf8()..], &text[c.len_utf8()..]),
            _ => false,
        },
    }
}

fn scaling(casts: &LinearCasts) -> String {
    match casts.input.scaling {
        Scaling::Current(how) => {
            let GranularityInfo { each: what, power_of_two, .. } = casts.input.granularity.info();
            let rounded = if how.power_of_two || power_of_two { ", rounded to a power of two" } else { "" };
            let squares = match casts.grad_output.granularity {
                Granularity::MixedBlocks => {
                    "; wgrad_blocks: dy in 128x128 for wgrad, which is slower with 1x128 in both"
                }
                _ => "",
            };
            let emulated = match casts.input.granularity.microscaling() {
                Some(_) => "; emulated by products of dequantized values",
                None => "",
            };
            format!("each {what} is scaled by its own amax{rounded}{squares}{emulated}")
        }
        Scaling::Delayed { how, window, .. } => {
            let reducer = match how.reducer {
                AmaxReducer::Max => "the largest",
                AmaxReducer::MostRecent => "the newest",
            };
            let every = if how.interval == 1 { String::new() } else { format!(", every {} steps", how.interval) };
            format!("scaled by {reducer} of the last {window} amaxes, margin {}{every}", how.margin)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExceptionsConfig, Fp8Format, Precision, PrecisionOverride, RecipeName};
    use ottava_tensor::Device;
    use ottava_tensor::cuda::GpuModel;
    use ottava_tensor::ops::Accumulation;

    fn site(block: usize, name: &str, parts: &[&str]) -> LinearSite {
        let full = |name: &str| format!("model.layers.{block}.{name}");
        let parts = parts.iter().map(|part| full(part)).collect();
        let after_swiglu = name == "mlp.down_proj";
        LinearSite {
            name: full(name),
            parts,
            outputs: 1024,
            inputs: 1024,
            block: Some((block, 12)),
            after_swiglu,
            divides_inputs: after_swiglu,
            experts: None,
        }
    }

    fn sites() -> Vec<LinearSite> {
        let kinds: [(&str, &[&str]); 2] = [
            ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("mlp.down_proj", &["mlp.down_proj"]),
        ];
        (0..12).flat_map(|block| kinds.map(|(name, parts)| site(block, name, parts))).collect()
    }

    fn recipe(patterns: &[&str]) -> Recipe {
        let high_precision_layers = patterns.iter().map(|p| p.to_string()).collect();
        let exceptions = ExceptionsConfig { high_precision_layers, ..ExceptionsConfig::default() };
        Precision { recipe: RecipeName::Fp8Delayed, exceptions, ..Precision::default() }.recipe()
    }

    /// Returns the linears that stay in high precision.
    fn high(recipe: &Recipe) -> Vec<String> {
        let sites = sites().into_iter().filter(|site| recipe.decide(site).unwrap().fp8.is_none());
        sites.map(|site| site.name.trim_start_matches("model.layers.").to_string()).collect()
    }

    #[test]
    fn patterns_name_linears_weights_and_modules() {
        for pattern in ["model.layers.1", "model.layers.1.*", "*.layers.1"] {
            assert_eq!(high(&recipe(&[pattern])), ["1.self_attn.qkv_proj", "1.mlp.down_proj"], "{pattern}");
        }
        for pattern in ["*.1?.mlp", "*.1?.mlp.down_proj", "model.layers.1?.mlp.down_proj.weight", "*.1?.*down*"] {
            assert_eq!(high(&recipe(&[pattern])), ["10.mlp.down_proj", "11.mlp.down_proj"], "{pattern}");
        }
        assert_eq!(high(&recipe(&["*"])).len(), 24);
        assert_eq!(high(&recipe(&[])), [""; 0]);
        assert_eq!(high(&recipe(&["*.0.self_attn.qkv_proj"])), ["0.self_attn.qkv_proj"]);
    }

    #[test]
    fn parts_of_one_product_are_named_together() {
        let recipe_of_all = recipe(&["*.3.self_attn.q_proj", "*.3.self_attn.k_proj", "*.3.self_attn.v_proj"]);
        assert_eq!(high(&recipe_of_all), ["3.self_attn.qkv_proj"]);
        let error = recipe(&["*.q_proj", "*.k_proj"]).decide(&sites()[0]).unwrap_err().to_string();
        for part in ["`*.q_proj` matches `model.layers.0.self_attn.q_proj`", "`model.layers.0.self_attn.v_proj`; they"]
        {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_an_error() {
        let error = recipe(&["*.mlp", "*.down_prj"]).check(&sites(), &[]).unwrap_err().to_string();
        assert!(error.contains("`*.down_prj` matches no linear of this model"), "{error}");
        recipe(&["lm_head"]).check(&sites(), &["lm_head".into()]).unwrap();
        recipe(&["lm_head.weight"]).check(&sites(), &["lm_head".into()]).unwrap();
    }

    #[test]
    fn blocks_at_both_ends_stay_in_high_precision() {
        let mut recipe = recipe(&[]);
        (recipe.exceptions.first, recipe.exceptions.last) = (1, 2);
        let blocks = ["0", "10", "11"].map(|b| ["self_attn.qkv_proj", "mlp.down_proj"].map(|l| format!("{b}.{l}")));
        assert_eq!(high(&recipe), blocks.concat());
        assert_eq!(recipe.decide(&sites()[0]).unwrap().reason, "first_layers_bf16 = 1");
        assert_eq!(recipe.decide(&sites()[23]).unwrap().reason, "last_layers_bf16 = 2");
    }

    #[test]
    fn linears_after_swiglu_are_smooth_where_all_their_products_are_in_fp8() {
        use crate::ProductName::Wgrad;
        let smooth = |precision: &Precision| {
            let recipe = precision.recipe();
            let decisions = sites().into_iter().map(|site| (site.name.clone(), recipe.decide(&site).unwrap()));
            decisions.filter(|(_, decision)| decision.smooth).collect::<Vec<_>>()
        };
        let precision = Precision { recipe: RecipeName::Fp8Delayed, smooth_swiglu: true, ..Precision::default() };
        let all = smooth(&precision);
        assert_eq!(all.len(), 12);
        for (name, decision) in all {
            assert!(name.ends_with("mlp.down_proj") && decision.reason.contains("smooth_swiglu: "), "{name}");
            let (casts, _) = decision.fp8.unwrap();
            assert!(matches!(casts.input.scaling, Scaling::Delayed { .. }), "{name}");
            assert!(matches!(casts.weight.scaling, Scaling::Current(_)), "{name}: no history knows the weight");
        }
        assert_eq!(
            smooth(&Precision {
                exceptions: ExceptionsConfig { last_layers_bf16: 3, ..ExceptionsConfig::default() },
                ..precision.clone()
            })
            .len(),
            9
        );
        assert_eq!(
            smooth(&Precision {
                exceptions: ExceptionsConfig { high_precision_products: vec![Wgrad], ..ExceptionsConfig::default() },
                ..precision.clone()
            })
            .len(),
            0
        );
        assert_eq!(smooth(&Precision { recipe: RecipeName::Fp8Row, ..precision.clone() }).len(), 0);
        assert_eq!(smooth(&Precision { smooth_swiglu: false, ..precision }).len(), 0);
    }

    fn with(overrides: Vec<PrecisionOverride>) -> Precision {
        Precision { recipe: RecipeName::Fp8Delayed, overrides, ..Precision::default() }
    }

    fn other(layers: &[&str], recipe: Option<RecipeName>) -> PrecisionOverride {
        let layers = layers.iter().map(|pattern| pattern.to_string()).collect();
        PrecisionOverride { layers, recipe, fp8_format: None, high_precision_products: None }
    }

    #[test]
    fn the_first_override_that_names_a_linear_counts() {
        use crate::ProductName::Wgrad;
        let block = other(&["*.1.mlp"], Some(RecipeName::Fp8Block));
        let rows = other(&["*.down_proj"], Some(RecipeName::Fp8Row));
        let bf16 = other(&["*.2.*", "*.absent.*", "*.no_more"], Some(RecipeName::Bf16));
        let wgrad = PrecisionOverride { high_precision_products: Some(vec![Wgrad]), ..other(&["*.qkv_proj"], None) };
        let precision = Precision {
            exceptions: ExceptionsConfig { first_layers_bf16: 1, ..ExceptionsConfig::default() },
            ..with(vec![block, rows, bf16, wgrad])
        };
        let recipe = precision.recipe();
        let decided = |number: usize| recipe.decide(&sites()[number]).unwrap();
        let granularity = |number: usize| decided(number).fp8.unwrap().0.input.granularity;
        assert_eq!(decided(1).reason, "first_layers_bf16 = 1");
        assert_eq!(granularity(3), Granularity::Blocks1x128);
        assert_eq!(granularity(5), Granularity::PerRow);
        assert!(decided(5).reason.starts_with("`*.down_proj` of overrides: recipe fp8-row: "), "{}", decided(5).reason);
        assert_eq!(decided(4).reason, "`*.2.*` and 2 more of overrides: recipe bf16 casts nothing to FP8");
        let (casts, products) = decided(6).fp8.unwrap();
        assert!(matches!(casts.input.scaling, Scaling::Delayed { .. }));
        assert_eq!(products.wgrad, ProductPrecision::High);
        assert!(recipe.casts_to_fp8());
        let from_bf16 =
            Precision { recipe: RecipeName::Bf16, ..with(vec![other(&["*.down_proj"], Some(RecipeName::Fp8Row))]) };
        assert!(from_bf16.recipe().casts_to_fp8() && from_bf16.problems().is_empty());
        assert_eq!(high(&from_bf16.recipe()).len(), 12);
    }

    #[test]
    fn wrong_overrides_are_errors() {
        let error = with(vec![other(&["*.dwn_proj"], Some(RecipeName::Bf16))]).recipe().check(&sites(), &[]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`precision.overrides`: `*.dwn_proj` matches no linear of this model"), "{error}");
        let part = with(vec![other(&["*.q_proj"], Some(RecipeName::Bf16))]).recipe().decide(&sites()[0]);
        assert!(part.unwrap_err().to_string().contains("`precision.overrides`: `*.q_proj` matches"));
        for (overrides, base, words) in [
            (
                other(&[], Some(RecipeName::Bf16)),
                RecipeName::Fp8Row,
                "table 1 of [[precision.overrides]] needs `layers`",
            ),
            (other(&["a"], None), RecipeName::Fp8Row, "table 1 of [[precision.overrides]] changes nothing"),
            (
                other(&["a"], Some(RecipeName::Fp16)),
                RecipeName::Fp8Row,
                "has recipe fp16, and activations of the run are in BF16",
            ),
            (other(&["a"], Some(RecipeName::Fp8Row)), RecipeName::Fp32, "recipe fp32 has no other formats"),
            (
                PrecisionOverride { fp8_format: Some(Fp8Format::E4m3), ..other(&["a"], Some(RecipeName::Nvfp4)) },
                RecipeName::Bf16,
                "has recipe nvfp4, whose values are E2M1; leave `fp8_format` out",
            ),
        ] {
            let problems = Precision { recipe: base, ..with(vec![overrides]) }.problems().join("\n");
            assert!(problems.contains(words), "{problems}");
        }
    }

    /// Experts have no products with a scale of the tensor, scales have no settings, and speed makes no exceptions on a GPU.
    #[test]
    fn nvfp4_has_the_casts_of_its_recipe() {
        let nvfp4 = Precision { recipe: RecipeName::Nvfp4, ..Precision::default() };
        let recipe = nvfp4.recipe_on(&Device::dry_gpu(GpuModel::h200()), 96);
        let (casts, products) = recipe.decide(&sites()[0]).unwrap().fp8.unwrap();
        let granularities = [casts.input, casts.weight, casts.grad_output].map(|cast| cast.granularity);
        assert_eq!(granularities, [Granularity::Nvfp4, Granularity::Nvfp4Squares, Granularity::Nvfp4Stochastic]);
        assert_eq!(products.wgrad, ProductPrecision::Fp8(Accumulation::Exact));
        let experts = LinearSite { experts: Some(ExpertCounts { count: 4, chosen: 2 }), ..sites()[0].clone() };
        let decision = recipe.decide(&experts).unwrap();
        assert!(decision.fp8.is_none() && decision.reason.contains("experts have no products"), "{}", decision.reason);
        assert_eq!(nvfp4.problems(), [""; 0]);
        for (precision, key) in [
            (Precision { power_of_two_scales: true, ..nvfp4.clone() }, "power_of_two_scales"),
            (Precision { fp8_format: Fp8Format::E4m3, ..nvfp4.clone() }, "fp8_format"),
        ] {
            let problems = precision.problems().join("\n");
            assert!(problems.contains(&format!("`precision.{key}` is not for \"nvfp4\"")), "{problems}");
        }
    }

    #[test]
    fn slow_linears_stay_on_a_gpu_where_speed_decides() {
        let gpu = Device::dry_gpu(GpuModel::h200());
        let precision = Precision { recipe: RecipeName::Fp8Delayed, ..Precision::default() };
        assert_eq!(high(&precision.recipe_on(&gpu, 8192)).len(), 24);
        assert_eq!(high(&precision.recipe_on(&gpu, 16384)).len(), 0);
        let current = Precision { recipe: RecipeName::Fp8Current, ..precision.clone() };
        assert_eq!(
            [32768, 65536].map(|tokens| high(&current.recipe_on(&gpu, tokens)).len()),
            [24, 0],
            "which casts in two passes"
        );
        for cpu in [Device::Cpu, Device::Cpu.dry()] {
            assert_eq!(high(&precision.recipe_on(&cpu, 8192)).len(), 0, "whose speed was not measured");
        }
        assert_eq!(high(&precision.recipe()).len(), 0);
        let reason = precision.recipe_on(&gpu, 8192).decide(&sites()[0]).unwrap().reason;
        assert_eq!(reason, "skip_slow_linears: at 8192 tokens FP8 is slower than bfloat16");
    }

    /// Devices without the products of a recipe refuse it, with a recipe that runs instead.
    #[test]
    fn a_recipe_without_its_products_on_a_gpu_is_refused() {
        let check = |gpu: &str, recipe: RecipeName| {
            let recipe = Precision { recipe, ..Precision::default() }.recipe();
            recipe.expect_on(&Device::dry_gpu(GpuModel::named(gpu).unwrap())).map_err(|error| error.to_string())
        };
        use RecipeName::{Bf16, Fp8Block, Fp8Current, Fp8Row, Mxfp8, Nvfp4};
        for (gpu, recipe) in [("H200", Fp8Block), ("H100", Fp8Row), ("L40S", Fp8Current), ("A100", Bf16)] {
            check(gpu, recipe).unwrap();
        }
        for (gpu, recipe) in ["H200", "B200", "A100"].into_iter().flat_map(|gpu| [(gpu, Mxfp8), (gpu, Nvfp4)]) {
            check(gpu, recipe).unwrap();
        }
        for (gpu, recipe, parts) in [
            ("L40S", Fp8Row, ["no FP8 products with per-row scales on Ada", "use recipe fp8-current,"]),
            ("A100", Fp8Current, ["no FP8 products with per-tensor scales on Ampere", "use recipe bf16,"]),
            ("B200", Fp8Row, ["no FP8 products with per-row scales on Blackwell", "use recipe fp8-current,"]),
        ] {
            let message = check(gpu, recipe).unwrap_err();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}
