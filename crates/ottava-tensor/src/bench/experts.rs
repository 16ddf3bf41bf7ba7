//! Ops between the tokens and the experts of a mixture: routing, gathers and combines.

use super::table::{CastTensors, Table, bf16, own};
use crate::ops::*;
use crate::{DType, Granularity, Result, Tensor};

/// The number of experts, and the number of experts that a token is sent to.
const EXPERTS: usize = 64;
const CHOSEN: usize = 8;

/// Times ops on activations `[T, C]` of `t` tokens.
pub(super) fn rows(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let device = table.device();
    let CastTensors { seen, .. } = &mut CastTensors::new(device)?;
    let routing =
        Routing { chosen: CHOSEN, scores: RouterScores::Softmax, normalise: Some(0.0), scale: 1.0, groups: None };
    let logits = table.random(&[t, EXPERTS], DType::F32)?;
    let (of_logits, of_choices) = (4 * t * EXPERTS, 4 * t * CHOSEN);
    table.row("route", of_logits + 2 * of_choices, &mut || route(&logits, None, routing, None).map(drop))?;
    let routes = route(&logits, None, routing, None)?;
    let dweights = table.random(&[t, CHOSEN], DType::F32)?;
    table.row("route_backward", 2 * of_logits + 2 * of_choices, &mut || {
        route_backward(&logits, &routes, &dweights, routing, None).map(drop)
    })?;
    table.row("slots of experts", 3 * of_choices, &mut || slots(&routes.ids, 0..EXPERTS).map(drop))?;
    let slots = slots(&routes.ids, 0..EXPERTS)?;
    let (x, rows) = (table.random(&[t, c], DType::BF16)?, slots.pair_of.len());
    table.row("gather of experts", bf16(t * c + rows * c), &mut || {
        gather_to(&x, &slots, None, Output::Plain).map(drop)
    })?;
    for (name, granularity) in [
        ("gather of experts, FP8 by rows", Granularity::PerRow),
        ("gather of experts, FP8 by 1x128", Granularity::Blocks1x128),
    ] {
        table.row(name, bf16(t * c) + 2 * rows * c, &mut || {
            gather_to(&x, &slots, None, own(granularity, seen)).map(drop)
        })?;
    }
    let mut z: Tensor = table.random(&[rows, c], DType::BF16)?;
    table.row("combine of experts", bf16(t * CHOSEN * c + 2 * t * c), &mut || {
        combine(&z, &slots, Some(&routes.weights), Some(&x)).map(drop)
    })?;
    table.row("gathered_weight_gradient", bf16(2 * x.len() * CHOSEN), &mut || {
        gathered_weight_gradient(&z, &x, &slots).map(drop)
    })?;
    let (bias, groups) = (table.random(&[EXPERTS, c], DType::BF16)?, &slots.groups);
    let mut dbias = Tensor::zeros(device, &[EXPERTS, c], DType::F32)?;
    let mut dots = Tensor::zeros(device, &[rows], DType::F32)?;
    table.row("add_grouped_bias", bf16(2 * rows * c), &mut || add_grouped_bias(&mut z, &bias, groups))?;
    table.row("grouped_bias_gradient", bf16(rows * c), &mut || grouped_bias_gradient(&z, groups, &mut dbias))?;
    table.row("grouped_bias_dots", bf16(rows * c), &mut || grouped_bias_dots(&z, &bias, groups, &mut dots))?;
    let (dy, hidden) = (table.random(&[t, c], DType::BF16)?, table.random(&[t, 2 * c], DType::BF16)?);
    table.row("activation_dots", bf16(3 * t * c), &mut || activation_dots(Activation::SwiGlu, &dy, &hidden).map(drop))
}
