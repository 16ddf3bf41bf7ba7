//! Merges adapters of experts into the weights of a folder, which has a tensor for each expert or one tensor for all experts of a layer.

use crate::safetensors::TensorInfo;
use crate::{AdapterFolder, stacks};
use ottava_common::error::{Error, Result};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::Precision;
use ottava_recipe::lora::PEFT_PREFIX;
use ottava_recipe::param::{AdapterMatrix, ExpertAdapter, FolderLayout, FolderTensor, StackOrder, Stacked};
use ottava_tensor::ops::{Accumulation, Operand, add, gemm_nt};
use ottava_tensor::{DType, Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;

/// The adapters of the experts of a model, by the weights that they change.
pub(super) struct ExpertChanges {
    /// The matrices of all adapters, `A` and `B` of each expert in turn.
    adapters: Vec<FolderTensor>,
    /// The matrices of experts that have adapters, by the names of the tensors of the folder that have them.
    weights: HashMap<String, Vec<Change>>,
}

/// The change of the matrix of a linear of an expert.
#[derive(Clone)]
struct Change {
    /// The matrix.
    weight: FolderTensor,
    /// The place of `A` in [`ExpertChanges::adapters`]. `B` is the next.
    adapter: usize,
    /// The rows of the matrix in `B`.
    rows: Range<usize>,
    scale: f64,
}

impl ExpertChanges {
    /// Returns the adapters of experts in `adapter` for a model of these `sizes`, whose experts have the layout of the base model's folder.
    pub fn new(adapter: &AdapterFolder, sizes: DecoderConfig) -> Result<ExpertChanges> {
        let mut changes = ExpertChanges { adapters: Vec::new(), weights: HashMap::new() };
        if sizes.experts().is_none() || adapter.lora.parameters.is_empty() {
            return Ok(changes);
        }
        let recipe = Precision::default().recipe();
        let scales = Decoder::describe(&sizes, &recipe)?;
        let scales = scales.experts.iter().filter_map(|parameter| {
            let found = adapter.lora.of_experts(parameter).transpose()?;
            Some(found.map(|found| (parameter.name.clone(), found.scale)))
        });
        let scales = scales.collect::<Result<HashMap<String, f64>>>()?;
        let tensors = Decoder::folder_tensors(&sizes, &recipe)?;
        let by_name: HashMap<&str, &FolderTensor> =
            tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        for a in &tensors {
            let FolderLayout::ExpertAdapter(place) = a.layout else { continue };
            if place.matrix == AdapterMatrix::A {
                let b = by_name[a.name.replace(".lora_A.", ".lora_B.").as_str()];
                changes.add(a, b, &place, &by_name, &scales);
            }
        }
        Ok(changes)
    }

    /// Adds the adapter `a`, `b` of an expert.
    fn add(
        &mut self,
        a: &FolderTensor,
        b: &FolderTensor,
        place: &ExpertAdapter,
        by_name: &HashMap<&str, &FolderTensor>,
        scales: &HashMap<String, f64>,
    ) {
        let name = a.name.strip_prefix(PEFT_PREFIX).expect("a tensor of an adapter");
        let (module, rest) = name.rsplit_once(".experts.").expect("an expert is one of experts");
        let (_, rest) = rest.split_once('.').expect("a name after the number");
        let (parameter, _) = rest.split_once(".lora_").expect("a matrix of an adapter");
        let scale = scales[&format!("{module}.experts.{parameter}")];
        let (adapter, mut end) = (self.adapters.len(), 0);
        self.adapters.extend([a.clone(), b.clone()]);
        for linear in place.linears {
            let weight = by_name[format!("{module}.experts.{}.{linear}.weight", place.expert).as_str()].clone();
            let start = end;
            end += weight.shape[0];
            let change = Change { weight, adapter, rows: start..end, scale };
            self.weights.entry(change.weight.stored_name()).or_default().push(change);
        }
    }

    /// Returns the matrices of the adapters.
    pub fn adapters(&self) -> &[FolderTensor] {
        &self.adapters
    }

    /// Returns the tensor `info` of the base with its adapters added, in F32. Returns `None` if it has none.
    pub fn merged(
        &self,
        adapter: &AdapterFolder,
        info: &TensorInfo,
        values: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let Some(changes) = self.weights.get(&info.name) else { return Ok(None) };
        let expected = changes[0].weight.stored_shape();
        if info.shape != expected {
            let TensorInfo { name, shape, .. } = info;
            return Err(Error::Model(format!("`{name}` has shape {shape:?}, and config.json makes it {expected:?}")));
        }
        let stored = values()?;
        let matrix = |change: &Change, w: Tensor| -> Result<Tensor> {
            let read = |at: usize| {
                let tensor = &self.adapters[at];
                let FolderLayout::ExpertAdapter(place) = &tensor.layout else { unreachable!("a matrix of an adapter") };
                adapter.of_expert(tensor, place)
            };
            let (a, b) = (read(change.adapter)?, read(change.adapter + 1)?);
            let b = b.rows(change.rows.start, change.rows.end)?;
            Ok(add(&w, &low_rank_change(&a, &b, change.scale)?)?)
        };
        let FolderLayout::Stacked(stack) = changes[0].weight.layout else {
            return matrix(&changes[0], stored).map(Some);
        };
        let shape = &changes[0].weight.shape;
        let mut all = in_memory(&stored, stack, shape)?;
        for change in changes {
            let FolderLayout::Stacked(Stacked { expert, linear, linears, .. }) = change.weight.layout else { continue };
            let first = (expert * linears + linear) * shape[0];
            let sum = matrix(change, all.rows(first, first + shape[0])?)?;
            all.copy_from(first, &sum)?;
        }
        Ok(Some(stacks::stored(&all, stack)?.reshape(&info.shape)?))
    }
}

/// Returns `scale · b · a` in F32.
pub(super) fn low_rank_change(a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let product = gemm_nt(Operand::plain(b), Operand::plain_transposed(a), DType::F32, Accumulation::Exact)?;
    let change: Vec<f32> = product.to_vec::<f32>()?.into_iter().map(|change| scale as f32 * change).collect();
    Ok(Tensor::from_slice(&Device::Cpu, product.shape(), &change)?)
}

/// Returns the linears of all experts, `[E · L · N, K]` in F32, from the tensor `stored` of a folder. `shape` is the shape of a linear.
fn in_memory(stored: &Tensor, Stacked { order, experts, linears, .. }: Stacked, shape: &[usize]) -> Result<Tensor> {
    let (rows, inputs) = (linears * shape[0], shape[1]);
    let mut all = Tensor::empty(&Device::Cpu, &[experts * rows, inputs], DType::F32)?;
    let stored = stored.reshape(&[experts, rows * inputs])?;
    for expert in 0..experts {
        let own = stored.rows(expert, expert + 1)?;
        let own = match order {
            StackOrder::OutputsFirst => own.reshape(&[rows, inputs])?,
            _ => stacks::divide(&own.reshape(&[inputs, rows])?, linears, order)?,
        };
        all.copy_from(expert * rows, &own)?;
    }
    Ok(all)
}
