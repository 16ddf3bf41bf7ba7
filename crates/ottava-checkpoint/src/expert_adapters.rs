//! Adapters of experts in PEFT's folders.
//!
//! PEFT with transformers 5 stores the adapters of all experts of a layer as two matrices ([`ExpertAdapter`]), called after the module of the experts:
//! `experts.lora_A.weight`, or `experts.base_layer.lora_A.weight` if PEFT has wrapped the module a second time, for the next parameter. Here they are
//! called after the parameter: `experts.gate_up_proj.lora_A.weight`.
//!
//! Older versions of transformers had linears for each expert. Their adapters are `experts.3.gate_proj.lora_A.weight`. As in PEFT, the adapters of gate
//! and up are read as one adapter: both `A` are stacked, and both `B` form a block-diagonal matrix.

#[cfg(test)]
mod tests;

use ottava_common::error::{Error, Result};
use ottava_models::layers::{EXPERT_PARAMETERS, expert_stack};
use ottava_recipe::lora::{Lora, PEFT_PREFIX, last_name, parameter_names};
use ottava_recipe::param::{AdapterMatrix, ExpertAdapter, FolderTensor, StackOrder};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{join_columns, transpose};
use std::collections::{BTreeMap, BTreeSet};

/// The names of the matrices of adapters, after the name of the module.
const MATRICES: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

/// Returns the name of a matrix of an adapter with the name of the adapted parameter in it, or `name` itself if it is no such matrix. `targets` are the
/// parameters in the settings of the adapter. `has_inner` says whether the file has another adapter of the same module, under the name `base_layer`.
pub(super) fn own_name(name: &str, targets: &[String], has_inner: impl Fn(&str) -> bool) -> String {
    let Some((module, matrix)) = MATRICES.iter().find_map(|end| {
        let module = name.strip_suffix(end)?.strip_suffix('.')?;
        Some((module, *end))
    }) else {
        return name.to_string();
    };
    let (experts, is_inner) = match module.strip_suffix(".base_layer") {
        Some(experts) => (experts, true),
        None => (module, false),
    };
    if !experts.ends_with(".experts") {
        return name.to_string();
    }
    let is_target = |parameter: &&&str| {
        let full = format!("{experts}.{parameter}");
        targets.iter().any(|target| full == *target || full.ends_with(&format!(".{target}")))
    };
    let [before, after] =
        [&EXPERT_PARAMETERS[..2], &EXPERT_PARAMETERS[2..]].map(|of| of.iter().find(is_target).copied());
    let inner = format!("{experts}.base_layer.{matrix}");
    let parameter = match is_inner {
        true => before.unwrap_or(EXPERT_PARAMETERS[0]),
        false if has_inner(&inner) => EXPERT_PARAMETERS[2],
        false => before.or(after).unwrap_or(EXPERT_PARAMETERS[0]),
    };
    format!("{experts}.{parameter}.{matrix}")
}

/// Returns whether `linear` is the name of experts or of a parameter of experts, as in the file of an adapter without the prefix.
pub(super) fn is_of_experts(linear: &str) -> bool {
    linear.contains(".experts.")
}

/// Returns the parameter of all experts, such as `model.layers.0.mlp.experts.gate_up_proj`, for a linear with an adapter: the parameter itself, or a
/// linear of an expert. Also returns the linear's name without the number of the expert.
fn parameter_of(linear: &str, is_gated: impl Fn(&str) -> bool) -> Option<(String, String)> {
    let (mixture, rest) = linear.rsplit_once(".experts.")?;
    let Some((expert, name)) = rest.split_once('.') else {
        return EXPERT_PARAMETERS.contains(&rest).then(|| (linear.to_string(), linear.to_string()));
    };
    expert.parse::<usize>().ok()?;
    let stack = match expert_stack(name)? {
        // Experts without a gate have one linear before the activation.
        (_, [1, 2]) if !is_gated(mixture) => format!("experts.{name}"),
        (stack, _) => stack.to_string(),
    };
    Some((format!("{mixture}.{stack}"), format!("{mixture}.experts.{name}")))
}

/// Adds the parameters of experts with adapters in a file to the targets of `lora`. `linears` are the names of all linears with adapters in the file.
///
/// A rank or factor of linears of each expert becomes a rank or factor of their parameter.
///
/// Errors with a sentence if linears of one parameter have different factors.
pub(super) fn with_parameters(mut lora: Lora, linears: &[String]) -> Result<Lora, String> {
    let of_experts = || linears.iter().filter_map(|linear| linear.rsplit_once(".experts."));
    // Only experts with a gate have a linear that is the first of two.
    let is_gate = |rest: &str| matches!(expert_stack(last_name(rest)), Some((_, [0, 2])));
    let gated: BTreeSet<&str> = of_experts().filter(|(_, rest)| is_gate(rest)).map(|(mixture, _)| mixture).collect();
    // For each parameter, the ranks and factors of its linears.
    let mut found = BTreeMap::<String, BTreeMap<String, (usize, f64)>>::new();
    for linear in linears.iter().filter(|linear| is_of_experts(linear)) {
        let Some((parameter, own)) = parameter_of(linear, |mixture| gated.contains(mixture)) else { continue };
        let of_parameter = found.entry(parameter).or_default();
        if own != *linear {
            of_parameter.entry(own).or_insert_with(|| (lora.rank(linear), lora.scale(linear)));
        }
    }
    for (parameter, of_linears) in found {
        if !lora.has_parameter(&parameter) {
            lora.parameters.push(parameter.clone());
        }
        let Some((_, scale)) = of_linears.values().next().copied() else { continue };
        if let Some((linear, (_, other))) = of_linears.iter().find(|(_, (_, other))| *other != scale) {
            return Err(format!(
                "the adapters of `{linear}` have the factor {other}, and other linears of `{parameter}` have {scale}; merge the adapter with PEFT"
            ));
        }
        let rank: usize = of_linears.values().map(|(rank, _)| rank).sum();
        let numerator = scale * if lora.use_rslora { (rank as f64).sqrt() } else { rank as f64 };
        let pattern = parameter.replace('.', "[.]");
        lora.exceptions.ranks.insert(pattern.clone(), rank);
        lora.exceptions.alphas.insert(pattern, numerator);
    }
    Ok(lora)
}

/// Returns the names in a file for the tensor `name` of a model: the same name, and the name that transformers gives to its mixture.
pub(super) fn file_names(name: &str) -> [String; 2] {
    parameter_names(name)
}

/// Returns the name of the matrix of all experts, with the name of the adapted parameter in it, and the names of the matrices of the linears of this expert.
pub(super) fn names_of(tensor: &FolderTensor, place: &ExpertAdapter) -> (String, Vec<String>) {
    let (mixture, rest) = tensor.name.rsplit_once(".experts.").expect("an expert is one of experts");
    let (expert, rest) = rest.split_once('.').expect("a name after the number");
    let (parameter, _) = rest.split_once(".lora_").expect("a matrix of an adapter");
    let [a, b] = MATRICES;
    let stored = if place.is_stored_as_a() { a } else { b };
    let own = if place.matrix == AdapterMatrix::A { a } else { b };
    let of = |linear: &&str| format!("{mixture}.experts.{expert}.{linear}.{own}");
    (format!("{mixture}.experts.{parameter}.{stored}"), place.linears.iter().map(of).collect())
}

/// Returns the matrix of an expert, row by row, from the values `stored` of all experts.
pub(super) fn of_expert(stored: &[f32], shape: &[usize], place: &ExpertAdapter) -> Vec<f32> {
    let (rows, columns) = (shape[0], shape[1]);
    let (experts, expert) = (place.experts, place.expert);
    // The index in the file of row `row` and column `column`.
    let at = |row: usize, column: usize| match (place.matrix, place.order) {
        (AdapterMatrix::A, StackOrder::OutputsFirst | StackOrder::Interleaved) => {
            (expert * rows + row) * columns + column
        }
        (AdapterMatrix::B, StackOrder::OutputsFirst) => row * columns * experts + column * experts + expert,
        (AdapterMatrix::B, StackOrder::Interleaved) => {
            let (linears, outputs) = (place.linears.len(), rows / place.linears.len());
            let row = row % outputs * linears + row / outputs;
            row * columns * experts + column * experts + expert
        }
        // PEFT takes outputs for inputs.
        (AdapterMatrix::A, StackOrder::InputsFirst) => column * rows * experts + row * experts + expert,
        (AdapterMatrix::B, StackOrder::InputsFirst) => (expert * columns + column) * rows + row,
    };
    (0..rows)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .map(|(row, column)| stored[at(row, column)])
        .collect()
}

/// Returns a matrix of an expert from the matrices of its linears: `A` stacked, or `B` as a block-diagonal matrix.
///
/// Errors with a sentence if the matrices do not have the shape `[rows, columns]` together.
pub(super) fn of_linears(parts: &[Tensor], shape: &[usize], matrix: AdapterMatrix) -> Result<Vec<f32>, String> {
    let (rows, columns) = (shape[0], shape[1]);
    let shapes: Vec<&[usize]> = parts.iter().map(Tensor::shape).collect();
    let all_rows: usize = shapes.iter().map(|shape| shape[0]).sum();
    let widths: Vec<usize> = shapes.iter().map(|shape| shape.get(1).copied().unwrap_or(0)).collect();
    let fits = match matrix {
        AdapterMatrix::A => widths.iter().all(|width| *width == columns),
        AdapterMatrix::B => widths.iter().sum::<usize>() == columns,
    };
    if all_rows != rows || !fits {
        return Err(format!(
            "has matrices of the shapes {shapes:?} for an expert, and the model makes them {shape:?} together"
        ));
    }
    let (mut values, mut first) = (Vec::with_capacity(rows * columns), 0);
    for (part, width) in parts.iter().zip(&widths) {
        let own = part.to_vec::<f32>().map_err(|error| error.to_string())?;
        for row in own.chunks_exact((*width).max(1)) {
            let before = if matrix == AdapterMatrix::A { 0 } else { first };
            values.extend(std::iter::repeat_n(0.0, before));
            values.extend_from_slice(row);
            values.extend(std::iter::repeat_n(0.0, columns - before - width));
        }
        first += width;
    }
    Ok(values)
}

/// Returns the tensor of a folder with a matrix of all experts, from the parameter `[E · rows, columns]`.
pub(super) fn stored(param: &Tensor, place: ExpertAdapter) -> Result<Tensor> {
    let ExpertAdapter { matrix, order, experts, linears, .. } = place;
    let [all, columns] = param.dims("adapters of experts")?;
    let rows = all / experts;
    Ok(match (matrix, order) {
        (AdapterMatrix::A, StackOrder::OutputsFirst | StackOrder::Interleaved) => param.clone(),
        (AdapterMatrix::A, StackOrder::InputsFirst) => {
            // From expert, rank, input to rank, input, expert to input, rank, expert.
            let last = transpose(&param.reshape(&[experts, rows * columns])?)?;
            join_columns(&last.reshape(&[rows, columns, experts])?, &[rows * experts])?
        }
        (AdapterMatrix::B, StackOrder::OutputsFirst | StackOrder::Interleaved) => {
            let last = transpose(&param.reshape(&[experts, rows * columns])?)?;
            let last = match order {
                StackOrder::Interleaved => {
                    let count = linears.len();
                    let width = columns * experts;
                    join_columns(&last.reshape(&[count, rows / count, width])?, &[count * width])?
                }
                _ => last,
            };
            last.reshape(&[rows, columns * experts])?
        }
        (AdapterMatrix::B, StackOrder::InputsFirst) => {
            // From expert, output, rank to rank, expert, output to expert, rank, output.
            let first = transpose(param)?;
            let joined = join_columns(&first.reshape(&[columns, experts, rows])?, &[columns * rows])?;
            joined.reshape(&[experts * columns, rows])?
        }
    })
}

/// Returns the name without the prefix of adapters, of the linear with an adapter whose `A` is `name`.
pub(super) fn linear_of(name: &str) -> Option<&str> {
    name.strip_prefix(PEFT_PREFIX)?.strip_suffix(".lora_A.weight")
}

/// Returns the error about a matrix of experts in the folder `path`.
pub(super) fn wrong(path: &std::path::Path, reason: &str) -> Error {
    Error::Model(format!("{}: the adapter {reason}", path.display()))
}
