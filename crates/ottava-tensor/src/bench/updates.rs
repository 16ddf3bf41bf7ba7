//! Updates with each storage format of weights, gradients and states.

use super::table::Table;
use crate::ops::*;
use crate::{DType, ExpandedTensor, Granularity, MemoryKind, QuantizedTensor, Result, ScaledTensor, Tensor};

/// The gradient and moments of an update.
struct Case {
    moments: Moments,
    plain: Tensor,
    scaled: Option<ScaledTensor>,
    seen: CastStatistics,
    norm: Tensor,
    scalars: AdamWScalars,
}

impl Case {
    fn update(&mut self, weight: UpdatedWeight, cast: Option<WeightCast>) -> Result<()> {
        let Case { moments, plain, scaled, seen, norm, scalars } = self;
        let grad = scaled.as_ref().map_or(Gradient::Plain(plain), Gradient::Scaled);
        let mut found = match scaled {
            Some(_) => Some(Tensor::zeros(norm.device(), &[3], DType::F32)?),
            None => None,
        };
        let amaxes = found.as_mut();
        let mut parameters =
            [AdamWParameter { weight, moments, grad, weight_decay: 0.1, seed: 7, offset: 0, amaxes, cast }];
        adamw_amaxes(&mut parameters, norm, scalars)?;
        adamw(&mut parameters, seen, norm, scalars)
    }
}

/// The settings of the timed updates.
const ADAMW: AdamW =
    AdamW { learning_rate: 1e-4, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1, max_norm: 1.0, gradient_scale: 1.0 };

/// Times one row per storage format, for a matrix of `shape`.
pub(super) fn rows(table: &mut Table, shape: [usize; 2]) -> Result<()> {
    let device = table.device();
    let n = shape[0] * shape[1];
    let mut master = normal(device, &shape, 0.02, 1)?;
    let grad = normal(device, &shape, 1.0, 4)?;
    table.row("cast, F32 to BF16", 6 * n, &mut || cast(&grad, DType::BF16).map(drop))?;
    table.row("global_norm", 4 * n, &mut || global_norm(&[Gradient::Plain(&grad)]).map(drop))?;
    table.row("checksums", 4 * n, &mut || checksums(&[&grad]).map(drop))?;
    let norm = global_norm(&[Gradient::Plain(&grad)])?;
    let mut scalars = AdamWScalars::new(device)?;
    scalars.set(&ADAMW)?;
    let plain = |dtype| -> Result<Moments> {
        Ok(Moments::Plain { m: Tensor::zeros(device, &shape, dtype)?, v: Tensor::zeros(device, &shape, dtype)? })
    };
    let (moments, seen) = (plain(DType::F32)?, CastStatistics::new(device, 1)?);
    let mut case = Case { moments, plain: grad, scaled: None, seen, norm, scalars };
    let mut copy = cast(&master, DType::BF16)?;
    table.row("adamw, F32 states and BF16 copy", 30 * n, &mut || {
        case.update(with_stored_copy(&mut master, &mut copy), None)
    })?;
    momenta(table, &case.plain, &case.norm, &mut master, &mut copy)?;
    let scale = Tensor::from_slice(device, &[1], &[64f32])?;
    let mut codes = quantize(&copy, DType::E4M3, &scale, CodeCopies::Both, &mut case.seen, 0)?;
    table.row("adamw, F32 states, BF16 copy, FP8 codes", 32 * n, &mut || {
        case.update(with_stored_copy(&mut master, &mut copy), codes_with_scale(&scale, &mut codes))
    })?;
    case.moments = plain(DType::BF16)?;
    let mut rest = Tensor::zeros(device, &shape, DType::I16)?;
    table.row("adamw, BF16 states, BF16 weights and rest, FP8 codes", 22 * n, &mut || {
        case.update(UpdatedWeight::Split { weight: &mut copy, rest: &mut rest }, codes_with_scale(&scale, &mut codes))
    })?;
    drop(rest);
    case.plain = cast(&case.plain, DType::BF16)?;
    table.row("adamw, BF16 states, stochastic rounding", 14 * n, &mut || {
        case.update(UpdatedWeight::Stochastic { weight: &mut copy }, None)
    })?;
    let mut amax = Tensor::zeros(device, &[1], DType::F32)?;
    table.row("adamw, BF16 states, stochastic rounding, amax", 14 * n, &mut || {
        case.update(UpdatedWeight::Stochastic { weight: &mut copy }, Some(WeightCast::Amax(&mut amax)))
    })?;
    table.row("adamw, BF16 states, FP8 weight codes", 16 * n, &mut || {
        case.update(UpdatedWeight::Stochastic { weight: &mut copy }, codes_with_scale(&scale, &mut codes))
    })?;
    let (granularity, how) = (Granularity::Blocks128x128, CurrentScaling::default());
    let mut blocks = quantize_blocks(&copy, DType::E4M3, granularity, how, CodeCopies::Both, &mut case.seen, 0)?;
    table.row("adamw, BF16 states, FP8 weight codes by 128x128", 16 * n, &mut || {
        let cast = WeightCast::Codes { scale: CastScale::Own(granularity, how), slot: 0, into: &mut blocks };
        case.update(UpdatedWeight::Stochastic { weight: &mut copy }, Some(cast))
    })?;
    drop(blocks);
    case.moments = Moments::Expanded {
        m: ExpandedTensor::zeros(device, &shape, MemoryKind::Device)?,
        v: ExpandedTensor::zeros(device, &shape, MemoryKind::Device)?,
    };
    table.row("adamw, expanded 8-bit states, stochastic rounding", 10 * n, &mut || {
        case.update(UpdatedWeight::Stochastic { weight: &mut copy }, None)
    })?;
    table.row("scaled, BF16 to E4M3", 5 * n, &mut || scaled(&case.plain, DType::E4M3).map(drop))?;
    case.scaled = Some(scaled(&case.plain, DType::E4M3)?);
    let mut weight = scaled(&master, DType::F16)?;
    drop(master);
    table.row("unscaled, F16 to BF16", 4 * n, &mut || unscaled(&weight, DType::BF16).map(drop))?;
    // The states are read twice: to find the scales, and to update.
    case.moments = plain(DType::F32)?;
    table.row("adamw, F32 states, F16 masters, E4M3 gradient", 32 * n, &mut || {
        case.update(with_computed_copy(&mut weight), None)
    })?;
    case.moments = Moments::Scaled {
        m: ScaledTensor::zeros(device, &shape, DType::E4M3, MemoryKind::Device)?,
        v: ScaledTensor::zeros(device, &shape, DType::F16, MemoryKind::Device)?,
    };
    table.row("adamw, E4M3 and F16 states, F16 masters, E4M3 gradient", 17 * n, &mut || {
        case.update(with_computed_copy(&mut weight), None)
    })?;
    table.row("adamw, the same and FP8 codes", 19 * n, &mut || {
        case.update(with_computed_copy(&mut weight), codes_with_scale(&scale, &mut codes))
    })?;
    Ok(())
}

/// Times the element-wise passes of Muon and Lion.
fn momenta(table: &mut Table, grad: &Tensor, norm: &Tensor, master: &mut Tensor, copy: &mut Tensor) -> Result<()> {
    let (n, device) = (grad.len(), grad.device());
    let mut scalars = MomentumScalars::new(device)?;
    let (beta1, beta2) = (0.95, 0.95);
    scalars.set(&MomentumStep { learning_rate: 1e-4, beta1, beta2, step: 1, max_norm: 1.0, gradient_scale: 1.0 })?;
    let mut direction = Tensor::zeros(device, grad.shape(), DType::BF16)?;
    for (name, dtype) in [("momentum, F32", DType::F32), ("momentum, BF16", DType::BF16)] {
        let mut state = Momentum::Plain(Tensor::zeros(device, grad.shape(), dtype)?);
        table.row(name, (6 + 2 * dtype.size()) * n, &mut || {
            let (momentum_of, grad, direction) = (&mut state, Gradient::Plain(grad), &mut direction);
            let parameter =
                MomentumParameter { momentum: momentum_of, grad, direction, seed: 7, offset: 0, amaxes: None };
            momentum(parameter, Direction::Nesterov, norm, &scalars)
        })?;
    }
    table.row("descend, F32 masters and BF16 copy", 12 * n, &mut || {
        let weight = with_stored_copy(master, copy);
        let (direction, weight_decay, seed) = (&direction, 0.1, 7);
        descend(DescendParameter { weight, direction, weight_decay, seed, offset: 0, amaxes: None }, norm, &scalars)
    })
}

fn codes_with_scale<'a>(scale: &'a Tensor, into: &'a mut QuantizedTensor) -> Option<WeightCast<'a>> {
    Some(WeightCast::Codes { scale: CastScale::Given(scale), slot: 0, into })
}

fn with_stored_copy<'a>(master: &'a mut Tensor, copy: &'a mut Tensor) -> UpdatedWeight<'a> {
    UpdatedWeight::Master { master, copy: WeightCopy::Stored(copy) }
}

fn with_computed_copy(master: &mut ScaledTensor) -> UpdatedWeight<'_> {
    UpdatedWeight::Scaled { master, copy: WeightCopy::OnDemand(DType::BF16) }
}
