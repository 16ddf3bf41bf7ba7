use super::{add_bias, add_grouped_bias, bias_gradient, grouped_bias_dots, grouped_bias_gradient};
use crate::ops::{Groups, slots};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn bias_agrees_across_devices() {
    for (t, c) in [(1, 1), (3, 7), (300, 257), (140, 520)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("x", &[t, c], dtype), normals("bias", &[c], dtype), normals("sum", &[c], DType::F32)];
            parity(&inputs[..2], Tolerance::Exact, |x| {
                let mut y = x[0].duplicate()?;
                add_bias(&mut y, &x[1])?;
                Ok(vec![y])
            });
            // Rows are summed in chunks on the GPU.
            parity(&inputs, Tolerance::Steps(DType::F32, 16.0), |x| {
                let mut sum = x[2].duplicate()?;
                bias_gradient(&x[0], &mut sum)?;
                Ok(vec![sum])
            });
        }
    }
}

#[test]
fn the_gradient_of_a_bias_is_the_sum_of_rows() {
    let (dy, mut sum) = (normals("dy", &[3, 2], DType::F64), normals("sum", &[2], DType::F64));
    let (before, rows) = (values(&sum), values(&dy));
    bias_gradient(&dy, &mut sum).unwrap();
    for c in 0..2 {
        assert_eq!(values(&sum)[c], before[c] + rows[c] + rows[2 + c] + rows[4 + c]);
    }
}

/// Returns the choices of rows among five experts. One expert has no row, and one has more rows than a chunk.
fn ids() -> Tensor {
    let ids: Vec<i32> = (0..300).map(|i| if i % 7 == 0 { i / 7 % 3 } else { 4 }).collect();
    Tensor::from_slice(&Device::Cpu, &[300, 1], &ids).unwrap()
}

/// Returns `x` with zeros in its padding.
fn without_padding(x: &Tensor, groups: &Groups) -> Tensor {
    let (columns, all) = (x.shape()[1], values(x));
    let (offsets, counts) = (groups.offsets.to_vec::<i32>().unwrap(), groups.counts.to_vec::<i32>().unwrap());
    let is_used = |row: i32| offsets.iter().zip(&counts).any(|(&start, count)| (start..start + count).contains(&row));
    let kept = all.iter().enumerate().map(|(i, x)| if is_used((i / columns) as i32) { *x as f32 } else { 0.0 });
    crate::ops::cast(&Tensor::from_slice(&Device::Cpu, x.shape(), &kept.collect::<Vec<f32>>()).unwrap(), x.dtype())
        .unwrap()
}

#[test]
fn grouped_bias_agrees_across_devices() {
    let placed = slots(&ids(), 0..5).unwrap();
    let rows = placed.pair_of.len();
    for columns in [1, 7, 257, 520] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [
                normals("x", &[rows, columns], dtype),
                normals("bias", &[5, columns], dtype),
                without_padding(&normals("dy", &[rows, columns], dtype), &placed.groups),
                normals("sum", &[5, columns], DType::F32),
                normals("dots", &[rows], DType::F32),
                ids(),
            ];
            parity(&inputs, Tolerance::Exact, |x| {
                let (mut y, groups) = (x[0].duplicate()?, slots(&x[5], 0..5)?.groups);
                add_grouped_bias(&mut y, &x[1], &groups)?;
                Ok(vec![y])
            });
            // Rows and columns are summed in chunks on the GPU.
            parity(&inputs, Tolerance::Steps(DType::F32, 32.0), |x| {
                let (mut sum, mut dots, groups) = (x[3].duplicate()?, x[4].duplicate()?, slots(&x[5], 0..5)?.groups);
                grouped_bias_gradient(&x[2], &groups, &mut sum)?;
                grouped_bias_dots(&x[2], &x[1], &groups, &mut dots)?;
                Ok(vec![sum, dots])
            });
        }
    }
}

/// Here padding is not zero; it must neither change nor be added.
#[test]
fn each_group_has_its_bias_and_padding_none() {
    let counts = [3, 0, 130];
    let groups = Groups::new(&Device::Cpu, &counts).unwrap();
    let (rows, starts) = (384 + 128, [0, 128, 128]);
    let (x, bias) = (normals("x", &[rows, 2], DType::F64), normals("bias", &[3, 2], DType::F64));
    let (mut y, mut sum) = (x.duplicate().unwrap(), normals("sum", &[3, 2], DType::F64));
    let mut dots = normals("dots", &[rows], DType::F64);
    let [x_values, b, sum_before, dots_before] = [&x, &bias, &sum, &dots].map(values);
    add_grouped_bias(&mut y, &bias, &groups).unwrap();
    grouped_bias_gradient(&x, &groups, &mut sum).unwrap();
    grouped_bias_dots(&x, &bias, &groups, &mut dots).unwrap();
    let group_of = |row: usize| (0..3).find(|&g| (starts[g]..starts[g] + counts[g]).contains(&row));
    let mut sums = sum_before;
    for row in 0..rows {
        let (mut expected, mut dot) = ([x_values[2 * row], x_values[2 * row + 1]], dots_before[row]);
        if let Some(g) = group_of(row) {
            dot += expected[0] * b[2 * g] + expected[1] * b[2 * g + 1];
            (0..2).for_each(|c| sums[2 * g + c] += expected[c]);
            (0..2).for_each(|c| expected[c] += b[2 * g + c]);
        }
        assert_eq!(values(&y)[2 * row..][..2], expected, "row {row}");
        // Two products and two sums of values near 1 in F64, in another order, differ by some units of 2⁻⁵³.
        assert!((values(&dots)[row] - dot).abs() < 1e-12, "row {row}");
    }
    assert_eq!(values(&sum), sums);
}
