//! The mesh of a run, and the ranks that share the scales of casts.

use ottava_common::error::Result;
use ottava_models::{Decoder, DecoderConfig, Span};
use ottava_parallel::{LayerAxes, Ranks};
use ottava_recipe::Recipe;
use ottava_recipe::param::Purpose;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_tensor::comm::{Axis, Group, MeshShape};
use serde::Serialize;
use std::rc::Rc;

/// The axes of a run, and the axes over which amaxes are reduced.
#[derive(Clone, Debug, Serialize)]
pub struct MeshPlan {
    /// The sizes of the axes.
    pub shape: MeshShape,
    /// The axes with more than one rank.
    pub axes: Vec<AxisPlan>,
    /// The casts of linears, by kind and by the ranks that share their scale.
    pub amaxes: Vec<AmaxPlan>,
}

/// A mesh axis with more than one rank.
#[derive(Clone, Debug, Serialize)]
pub struct AxisPlan {
    /// The axis.
    pub axis: Axis,
    /// The ranks of the groups of this axis, in words.
    pub ranks: String,
}

/// The casts whose scales are shared by the same ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AmaxPlan {
    /// The operand of these casts: `input`, `weight` or `grad_output`.
    pub cast: String,
    /// The number of casts.
    pub count: usize,
    /// The ranks that share a scale, for example "data x context".
    pub over: String,
}

impl MeshPlan {
    /// Returns the mesh of `config` for a model of `sizes` under `recipe`.
    pub(super) fn new(config: &RunConfig, sizes: &DecoderConfig, recipe: &Recipe) -> Result<MeshPlan> {
        let shape = config.parallel.mesh(config.parallel.ranks())?;
        // The model is the part of the first rank. Its layers know the ranks that divide them.
        let (cpu, whole) = (Device::Cpu.dry(), [Span::whole(sizes.layers.len())]);
        let ranks = Rc::new(Ranks::new(Group::dry(0, shape.ranks()), shape, &cpu)?);
        let axes = Rc::new(LayerAxes::new(ranks));
        let model = Decoder::staged(sizes, recipe, &cpu, Purpose::Infer, config.data.max_length, &whole, axes)?;
        let several = Axis::ALL.into_iter().filter(|&axis| shape.size(axis) > 1);
        let axes = several.map(|axis| AxisPlan { axis, ranks: shape.describe(axis) }).collect();
        let mut amaxes: Vec<AmaxPlan> = Vec::new();
        for (name, group) in &model.description().casts {
            let (cast, over) = (name.rsplit('.').next().unwrap_or(name), group.to_string());
            match amaxes.iter_mut().find(|plan| plan.cast == cast && plan.over == over) {
                Some(plan) => plan.count += 1,
                None => amaxes.push(AmaxPlan { cast: cast.into(), count: 1, over }),
            }
        }
        Ok(MeshPlan { shape, axes, amaxes })
    }
}
