use super::*;
use crate::ops::destination::tests::hostile;
use crate::ops::quantize_blocks;
use crate::testing::{Tolerance, assert_close, parity};

const PLAIN: CurrentScaling = CurrentScaling { epsilon: 0.0, power_of_two: false };

/// Returns unequal cuts of a matrix: within blocks, at their ends, with an empty slice, and with a slice within a row.
fn cuts(rows: usize, columns: usize) -> Vec<usize> {
    vec![0, 128, 37 * columns + 128, 37 * columns + 128, 128 * columns, rows * columns]
}

/// Returns the results of the casts of all slices of `x`, with the amaxes of all slices: codes, scales of both copies, statistics.
fn by_slices(x: &Tensor, [rows, columns]: [usize; 2], dtype: DType, how: CurrentScaling) -> Result<Vec<Tensor>> {
    let (x, cuts) = (x.reshape(&[rows * columns])?, cuts(rows, columns));
    let slices =
        cuts.windows(2).map(|ends| Ok((x.rows(ends[0], ends[1])?, MatrixSlice { rows, columns, start: ends[0] })));
    let slices = slices.collect::<Result<Vec<_>>>()?;
    let amaxes = slices.iter().map(|(x, slice)| slice_amaxes(x, dtype, *slice)?.to_vec::<f32>());
    let all = amaxes
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .reduce(|all, own| all.into_iter().zip(own).map(|(a, b)| a.max(b)).collect());
    let amaxes = Tensor::from_slice(x.device(), &[rows * columns / BLOCK / BLOCK], &all.expect("there are slices"))?;
    let (mut seen, mut codes, mut scales) = (CastStatistics::new(x.device(), 2)?, Vec::new(), Vec::new());
    for (x, slice) in slices {
        let mut into = empty_slice(x.device(), slice, x.len())?;
        quantize_slice(&x, dtype, slice, &amaxes, how, &mut into, (&mut seen, 1))?;
        codes.extend(into.codes.expect("it was written").read_bytes()?);
        scales = vec![into.scale_inv, *into.transposed_scale_inv.expect("it was written")];
    }
    let codes = Tensor::from_bytes(x.device(), &[rows, columns], DType::E4M3, &codes)?;
    Ok([codes].into_iter().chain(scales).chain([seen.amax, seen.saturated, seen.underflowed, seen.elements]).collect())
}

/// Slices and matrix are equal bit for bit on each device. Tests values that are rounded and values that are not.
#[test]
fn slices_are_cast_as_the_whole_matrix() {
    let size = [256, 640];
    for (stored, dtype) in [
        (DType::F32, DType::F32),
        (DType::F16, DType::F16),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::BF16),
        (DType::F32, DType::F16),
    ] {
        for how in [PLAIN, CurrentScaling { epsilon: 1e-4, power_of_two: true }] {
            parity(&[hostile("slices", &size, stored)], Tolerance::Exact, |x| {
                let got = by_slices(&x[0], size, dtype, how)?;
                let (whole, mut seen) = (cast(&x[0], dtype)?, CastStatistics::new(x[0].device(), 2)?);
                let (format, granularity) = (DType::E4M3, Granularity::Blocks128x128);
                let q = quantize_blocks(&whole, format, granularity, how, CodeCopies::Both, &mut seen, 1)?;
                let scales = [q.scale_inv, *q.transposed_scale_inv.expect("both copies were asked for")];
                let statistics = [seen.amax, seen.saturated, seen.underflowed, seen.elements];
                let expected = q.codes.into_iter().chain(scales).chain(statistics);
                for (i, (expected, got)) in expected.zip(&got).enumerate() {
                    assert_close(&format!("{stored} as {dtype}, part {i}"), &expected, got, Tolerance::Exact);
                }
                Ok(got)
            });
        }
    }
}

#[test]
fn slices_that_cut_blocks_of_a_row_are_refused() {
    let x = Tensor::zeros(&Device::Cpu, &[128], DType::F32).unwrap();
    for (rows, columns, start) in [(128, 192, 0), (100, 128, 0), (128, 128, 64), (128, 128, 128 * 128)] {
        let error = slice_amaxes(&x, DType::F32, MatrixSlice { rows, columns, start }).unwrap_err().to_string();
        assert!(error.contains("must be multiples of 128"), "{error}");
    }
}
