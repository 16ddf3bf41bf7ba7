//! Selects the linears that are exported in FP8, and their scales.

use super::format::{Fp8Format, Scheme};
use super::source::Source;
use ottava_common::error::{Error, Result};
use ottava_models::layers::Role;
use ottava_models::{Decoder, DecoderConfig, SublayerSpec};
use ottava_recipe::{Decision, LinearSite, Scaling};
use ottava_tensor::ops::CurrentScaling;
use std::collections::BTreeMap;

/// A linear that is exported in FP8 or in four bits, with the linears that engines fuse with it. They are cast together.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// The name of the linear in the scaling state.
    pub(super) name: String,
    /// The names of the linears in a folder, each with its number of outputs.
    pub(super) parts: Vec<(String, usize)>,
    /// The number of inputs, which all parts share.
    pub(super) inputs: usize,
    /// Whether ranks of tensor parallelism divide the inputs; otherwise, they divide the outputs.
    divides_inputs: bool,
    /// The source of the scale of the weights.
    pub(super) scale: Scale,
    /// Why the codes differ from the codes of training; `None` if they are equal.
    pub(super) recast: Option<String>,
    /// The scale of the input, if the format stores one: `code = cast(x / scale)`.
    pub(super) input_scale: Option<f32>,
}

/// The source of the scale of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    /// A scale of delayed scaling.
    Given(f32),
    /// The weight itself: the scale is computed from its amax.
    Own(CurrentScaling),
}

/// The linears of a model.
pub(super) struct Linears {
    pub(super) groups: Vec<Group>,
    /// The linears that stay in BF16, by their names in a folder, each with the reason. The last one is the head.
    pub(super) left: Vec<(String, String)>,
}

impl Linears {
    /// Decides for each linear of `source` whether it is exported in FP8 or stays in BF16, and why. The keys of `input_scales` are names of linears,
    /// fused or not.
    pub(super) fn decide(source: &Source, format: Fp8Format, input_scales: &BTreeMap<String, f32>) -> Result<Linears> {
        let sizes = &source.sizes;
        source.expect_matrices()?;
        let mut linears = Linears { groups: Vec::new(), left: Vec::new() };
        let (description, left) = (Decoder::describe(sizes, &source.recipe)?, source.left()?);
        for (site, decision) in &description.linears {
            let outputs = |part: &String| Ok((part.clone(), source.outputs(part)?));
            let parts: Vec<_> = site.parts.iter().map(outputs).collect::<Result<_>>()?;
            let excepted = source.exceptions.decide(site)?;
            let excepted = excepted.fp8.is_none().then_some(excepted.reason);
            let in_folder = site.parts.iter().any(|part| left.contains(part)).then(|| "in the folder too".to_string());
            if let Some(reason) = reason_to_leave(source, format, site, &parts, decision).or(in_folder).or(excepted) {
                linears.left.extend(parts.into_iter().map(|(part, _)| (part, reason.clone())));
                continue;
            }
            let input_scale = match format.scheme {
                Scheme::Static => {
                    Some(source.input_scale(&description, site, input_scales).ok_or_else(|| no_scale(site))?)
                }
                Scheme::Dynamic | Scheme::Block | Scheme::Nvfp4 | Scheme::Mxfp4 => None,
            };
            linears.groups.push(Group::new(source, format, site, parts, decision, input_scale));
        }
        if linears.groups.is_empty() {
            let reasons = linears.left.first().map_or("the model has no linears", |(_, reason)| reason);
            let hint = match format.scheme {
                Scheme::Block => "; `--format compressed-tensors` has one scale per output, and needs multiples of 16",
                Scheme::Dynamic | Scheme::Static | Scheme::Nvfp4 | Scheme::Mxfp4 => "",
            };
            return Err(source.config.error(&format!("no linear can be exported in this format: {reasons}{hint}")));
        }
        linears.left.push((sizes.stream.names.head.into(), "the head is never cast".into()));
        Ok(linears)
    }

    /// Returns the names of the linears that stay in BF16.
    pub(super) fn left_names(&self) -> Vec<String> {
        self.left.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns the maximum number of tensor parallel ranks at which each rank has whole heads, and shares of weights whose sizes are the multiples
    /// that `format` needs. With more ranks than key heads, engines give the same key head to several ranks.
    pub(super) fn tensor_parallel(&self, sizes: &DecoderConfig, format: Fp8Format) -> usize {
        let Some([heads, kv_heads]) = sizes.sublayers().find_map(SublayerSpec::head_counts) else { return 1 };
        let divides = |n: usize, ranks: usize| n.is_multiple_of(ranks) && (n / ranks).is_multiple_of(format.multiple());
        let fits = |group: &Group, ranks: usize| match group.divides_inputs {
            true => divides(group.inputs, ranks),
            false => group.parts.iter().all(|(name, outputs)| {
                let role = sizes.stream.names.role_of(&format!("{name}.weight")).map(|tensor| tensor.role);
                let of_keys = matches!(role, Some(Role::Key | Role::Value));
                divides(*outputs, if of_keys { ranks.min(kv_heads) } else { ranks })
            }),
        };
        let whole = |ranks: usize| {
            let [most, least] = [kv_heads.max(ranks), kv_heads.min(ranks)];
            heads.is_multiple_of(ranks) && most.is_multiple_of(least)
        };
        (1..=heads).rev().find(|&ranks| whole(ranks) && self.groups.iter().all(|group| fits(group, ranks))).unwrap_or(1)
    }
}

/// Returns why a linear stays in BF16; `None` if it can be in FP8.
fn reason_to_leave(
    source: &Source,
    format: Fp8Format,
    site: &LinearSite,
    parts: &[(String, usize)],
    decision: &Decision,
) -> Option<String> {
    if source.recipe.casts_to_fp8() && decision.fp8.is_none() {
        return Some(format!("in the run too: {}", decision.reason));
    }
    let multiple = format.multiple();
    let sizes = parts.iter().map(|(name, outputs)| (name, "outputs", *outputs));
    let mut sizes = sizes.chain([(&site.parts[0], "inputs", site.inputs)]);
    let (name, what, size) = sizes.find(|(_, _, size)| !size.is_multiple_of(multiple))?;
    let name = name.rsplit('.').next().unwrap_or(name);
    let fused = if parts.len() > 1 { ", and linears that engines fuse are all in FP8 or none" } else { "" };
    Some(format!("{name} has {size} {what}, no multiple of {multiple}{fused}"))
}

fn no_scale(site: &LinearSite) -> Error {
    Error::Config(format!(
        "there is no scale for the input of `{}`: measure them with `ottava calibrate` and name its file with --activation-scales, train \
         with recipe fp8-delayed, or choose a scheme that scales inputs by themselves",
        site.name
    ))
}

impl Group {
    fn new(
        source: &Source,
        format: Fp8Format,
        site: &LinearSite,
        parts: Vec<(String, usize)>,
        decision: &Decision,
        input_scale: Option<f32>,
    ) -> Group {
        let (scale, recast) = scale(source, format, site, decision);
        let (name, inputs, divides_inputs) = (site.name.clone(), site.inputs, site.divides_inputs);
        Group { name, parts, inputs, divides_inputs, scale, recast, input_scale }
    }

    /// Returns the number of outputs of all parts.
    pub(super) fn outputs(&self) -> usize {
        self.parts.iter().map(|(_, outputs)| outputs).sum()
    }
}

/// Returns the source of a weight's scale, and why the codes differ from the codes of training.
fn scale(source: &Source, format: Fp8Format, site: &LinearSite, decision: &Decision) -> (Scale, Option<String>) {
    let blocks = format.scheme == Scheme::Block;
    let own = CurrentScaling { epsilon: 0.0, power_of_two: blocks };
    let name = source.recipe.name;
    let Some((casts, _)) = decision.fp8 else {
        let from = match source.weights.quantization() {
            Some(quantization) => format!("FP8 weights of `{}`", quantization.method),
            None => "the weights, since the source is not an FP8 run".into(),
        };
        return (Scale::Own(own), Some(format!("cast from {from}")));
    };
    let again = |reason: &str| (Scale::Own(own), Some(format!("cast again from the weights: {reason}")));
    if !source.casts.contains(&format!("{}.weight", site.name)) {
        return again(
            "the run computed this linear in BF16, since FP8 is slower on its GPU (`precision.exceptions.skip_slow_linears`)",
        );
    }
    if decision.smooth {
        return again(
            "smooth_swiglu folds scales of the input into this weight, which the run casts anew for each micro-batch",
        );
    }
    if Some(casts.weight.granularity) != format.granularity() {
        return again(&format!(
            "the run's recipe {} scales weights differently ({})",
            name.as_str(),
            casts.weight.granularity
        ));
    }
    match casts.weight.scaling {
        Scaling::Delayed { .. } => match source.delayed.get(&format!("{}.weight", site.name)) {
            Some(scale) => (Scale::Given(*scale), None),
            None => again("the run has no history of this weight yet"),
        },
        Scaling::Current(how) => (Scale::Own(how), None),
    }
}
