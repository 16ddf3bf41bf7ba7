//! Activations of the MLP, relative to a copy of the same bytes.

use super::table::{CastTensors, Table, bf16, both, compressed, own};
use crate::ops::Activation::SwiGlu;
use crate::ops::*;
use crate::{DType, Granularity, Result, Tensor};

/// Times activations `[T, F]` with outputs in 16 bits and in FP8, from exact inputs and from inputs saved in FP8.
pub(super) fn rows(table: &mut Table, t: usize, f: usize) -> Result<()> {
    activations(table, t, f)?;
    saved_activations(table, t, f)?;
    activations_with_own_scales(table, t, f)
}

/// Times activations, and casts with one scale per tensor.
fn activations(table: &mut Table, t: usize, f: usize) -> Result<()> {
    let (device, tf) = (table.device(), t * f);
    let CastTensors { scale, amax, seen, unseen } = &mut CastTensors::new(device)?;
    let (gate_up, dy) = (table.random(&[t, 2 * f], DType::BF16)?, table.random(&[t, f], DType::BF16)?);
    table.row("swiglu", bf16(3 * tf), &mut || activation(SwiGlu, &gate_up).map(drop))?;
    table.row("swiglu_backward", bf16(5 * tf), &mut || activation_backward(SwiGlu, &dy, &gate_up).map(drop))?;
    table.row("swiglu, FP8", bf16(2 * tf) + 2 * tf, &mut || {
        activation_to(SwiGlu, &gate_up, both(scale, seen)).map(drop)
    })?;
    table
        .row("swiglu, amax", bf16(2 * tf), &mut || activation_to(SwiGlu, &gate_up, Output::Amax { amax }).map(drop))?;
    table.row("swiglu_backward, amax", bf16(3 * tf), &mut || {
        activation_backward_to(SwiGlu, &dy, &gate_up, Output::Amax { amax }, None).map(drop)
    })?;
    table.row("swiglu_backward, FP8", bf16(3 * tf) + 4 * tf, &mut || {
        activation_backward_to(SwiGlu, &dy, &gate_up, both(scale, seen), None).map(drop)
    })?;
    table.row("swiglu_backward, FP8, + activation", bf16(3 * tf) + 5 * tf, &mut || {
        let (format, copies) = (DType::E4M3, CodeCopies::Columns);
        let activated = Fp8Output { format, scale: CastScale::Given(scale), copies, statistics: unseen, slot: 0 };
        activation_backward_to(SwiGlu, &dy, &gate_up, both(scale, seen), Some(activated)).map(drop)
    })?;
    let [positive, negative] = [table.random(&[1], DType::BF16)?, table.random(&[1], DType::BF16)?];
    let alphas = XieluAlphas { positive: &positive, negative: &negative };
    let [mut dp, mut dn] = [Tensor::zeros(device, &[1], DType::F32)?, Tensor::zeros(device, &[1], DType::F32)?];
    table.row("xielu", bf16(2 * tf), &mut || xielu(&dy, alphas).map(drop))?;
    table
        .row("xielu_backward", bf16(3 * tf), &mut || xielu_backward(&dy, &dy, alphas, [&mut dp, &mut dn]).map(drop))?;
    let gelu = Activation::Gelu(Gelu::Tanh);
    table.row("gelu, FP8", bf16(tf) + 2 * tf, &mut || activation_to(gelu, &dy, both(scale, seen)).map(drop))?;
    table.row("gelu_backward, FP8, + activation", bf16(2 * tf) + 3 * tf, &mut || {
        let (format, copies) = (DType::E4M3, CodeCopies::Columns);
        let activated = Fp8Output { format, scale: CastScale::Given(scale), copies, statistics: unseen, slot: 0 };
        activation_backward_to(gelu, &dy, &dy, both(scale, seen), Some(activated)).map(drop)
    })?;
    Ok(())
}

/// Times activations whose inputs are saved in FP8.
fn saved_activations(table: &mut Table, t: usize, f: usize) -> Result<()> {
    let (device, tf) = (table.device(), t * f);
    let CastTensors { scale, amax, seen, unseen } = &mut CastTensors::new(device)?;
    let (gate_up, dy) = (table.random(&[t, 2 * f], DType::BF16)?, table.random(&[t, f], DType::BF16)?);
    table.row("swiglu, FP8, + compressed input", bf16(2 * tf) + 2 * tf + compressed(2 * tf), &mut || {
        activation_compressing(SwiGlu, &gate_up, both(scale, seen)).map(drop)
    })?;
    table.row("compress", bf16(2 * tf) + compressed(2 * tf), &mut || compress(&gate_up).map(drop))?;
    let saved = compress(&gate_up)?;
    table.row("decompress", bf16(2 * tf) + compressed(2 * tf), &mut || decompress(&saved).map(drop))?;
    let saved = SavedActivation::Compressed(saved);
    table.row("swiglu_backward of float8, amax", bf16(tf) + compressed(2 * tf), &mut || {
        activation_backward_to(SwiGlu, &dy, &saved, Output::Amax { amax }, None).map(drop)
    })?;
    table.row("swiglu_backward of float8, FP8, + activation", bf16(tf) + compressed(2 * tf) + 5 * tf, &mut || {
        let (format, copies) = (DType::E4M3, CodeCopies::Columns);
        let activated = Fp8Output { format, scale: CastScale::Given(scale), copies, statistics: unseen, slot: 0 };
        activation_backward_to(SwiGlu, &dy, &saved, both(scale, seen), Some(activated)).map(drop)
    })?;
    Ok(())
}

/// Times activations with scales per row and per block.
fn activations_with_own_scales(table: &mut Table, t: usize, f: usize) -> Result<()> {
    let (device, tf) = (table.device(), t * f);
    let CastTensors { seen, unseen, .. } = &mut CastTensors::new(device)?;
    let (gate_up, dy) = (table.random(&[t, 2 * f], DType::BF16)?, table.random(&[t, f], DType::BF16)?);
    for (name, granularity) in
        [("swiglu, FP8 by rows", Granularity::PerRow), ("swiglu, FP8 by 1x128", Granularity::Blocks1x128)]
    {
        table.row(name, bf16(2 * tf) + 2 * tf, &mut || {
            activation_to(SwiGlu, &gate_up, own(granularity, seen)).map(drop)
        })?;
    }
    // Forward writes no transpose, because backward writes the transposed codes.
    table.row("swiglu, FP8 by rows, without transpose", bf16(2 * tf) + tf, &mut || {
        let scale = CastScale::Own(Granularity::PerRow, CurrentScaling::default());
        let copies = CodeCopies::Rows;
        let to = Fp8Output { format: DType::E4M3, scale, copies, statistics: seen, slot: 0 };
        activation_to(SwiGlu, &gate_up, Output::Fp8(to)).map(drop)
    })?;
    for (names, granularity) in [
        (["swiglu_backward, FP8 by rows", "swiglu_backward, FP8 by rows, + activation"], Granularity::PerRow),
        (["swiglu_backward, FP8 by 1x128", "swiglu_backward, FP8 by 1x128, + activation"], Granularity::Blocks1x128),
        (
            [
                "swiglu_backward, FP8 by 1x128, transposed 128x128",
                "swiglu_backward, FP8 by 1x128, transposed 128x128, + activation",
            ],
            Granularity::MixedBlocks,
        ),
    ] {
        table.row(names[0], bf16(3 * tf) + 4 * tf, &mut || {
            activation_backward_to(SwiGlu, &dy, &gate_up, own(granularity, seen), None).map(drop)
        })?;
        table.row(names[1], bf16(3 * tf) + 5 * tf, &mut || {
            let (format, copies, how) = (DType::E4M3, CodeCopies::Columns, CurrentScaling::default());
            let scale = CastScale::Own(granularity.of_rows(), how);
            let activated = Fp8Output { format, scale, copies, statistics: unseen, slot: 0 };
            activation_backward_to(SwiGlu, &dy, &gate_up, own(granularity, seen), Some(activated)).map(drop)
        })?;
    }
    Ok(())
}
