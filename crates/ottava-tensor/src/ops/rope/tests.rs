use super::*;
use crate::ops::destination::tests::{destinations, hostile};
use crate::testing::{Tolerance, assert_close, normals, parity, values};

/// Returns the positions of `rows` tokens in sequences of `seq_len` tokens. The first position of a sequence is `start`.
fn positions(rows: usize, seq_len: usize, start: usize) -> Tensor {
    let positions: Vec<i32> = (0..rows).map(|t| (start + t % seq_len) as i32).collect();
    Tensor::from_slice(&Device::Cpu, &[rows], &positions).unwrap()
}

fn angles<'a>(table: &'a Tensor, positions: &'a Tensor) -> Angles<'a> {
    Angles { table, positions }
}

const PAIRS: [RopePairs; 2] = [RopePairs::Halves, RopePairs::Neighbours];

/// Gathering `2i, 2i + 1` into halves, rotating, and scattering back equals the rotation of neighbours, bit for bit.
#[test]
fn neighbours_are_halves_of_permuted_heads() {
    let (rows, heads, dim) = (3, 2, 6);
    let table = rope_table(&Device::Cpu, &[1.0, 0.3, 0.1], 9, DType::F32).unwrap();
    let at = positions(rows, rows, 4);
    let x = normals("x", &[rows, heads * dim], DType::F32).to_vec::<f32>().unwrap();
    let place = |i: usize| i / dim * dim + if i % dim < dim / 2 { i % dim * 2 } else { (i % dim - dim / 2) * 2 + 1 };
    let rotated = |x: &[f32], pairs| {
        let mut x = Tensor::from_slice(&Device::Cpu, &[rows, heads * dim], x).unwrap();
        rope(&mut x, angles(&table, &at), RopeLayout { heads, head_dim: dim, pairs }, Rotation::Forward).unwrap();
        x.to_vec::<f32>().unwrap()
    };
    let gathered: Vec<f32> = (0..x.len()).map(|i| x[place(i)]).collect();
    let (halves, neighbours) = (rotated(&gathered, RopePairs::Halves), rotated(&x, RopePairs::Neighbours));
    assert!((0..x.len()).all(|i| halves[i].to_bits() == neighbours[place(i)].to_bits()), "{halves:?}, {neighbours:?}");
}

#[test]
fn rope_agrees_across_devices() {
    let table = rope_table(&Device::Cpu, &[1.0, 0.1, 0.01], 20, DType::F32).unwrap();
    for (sequences, seq_len, heads, start) in [(1, 1, 1, 0), (2, 7, 3, 5), (3, 13, 2, 7)] {
        for (dtype, pairs) in [DType::F32, DType::BF16].into_iter().flat_map(|dtype| PAIRS.map(|pairs| (dtype, pairs)))
        {
            let layout = RopeLayout { heads, head_dim: 6, pairs };
            let x = normals("x", &[sequences * seq_len, heads * 6 + 4], dtype);
            parity(&[x, table.clone(), positions(sequences * seq_len, seq_len, start)], Tolerance::Exact, |t| {
                let (mut forward, mut backward) = (t[0].duplicate()?, t[0].duplicate()?);
                rope(&mut forward, angles(&t[1], &t[2]), layout, Rotation::Forward)?;
                rope(&mut backward, angles(&t[1], &t[2]), layout, Rotation::Backward)?;
                Ok(vec![forward, backward])
            });
        }
    }
}

/// If only the first elements of heads are rotated, the other elements keep their bits, and the rotated elements have the bits of smaller heads.
#[test]
fn a_part_of_each_head_may_be_rotated() {
    for (pairs, rotated, head_dim) in PAIRS.into_iter().flat_map(|p| [(p, 4, 10), (p, 16, 24), (p, 96, 128)]) {
        let frequencies: Vec<f64> = (0..rotated / 2).map(|i| 0.7f64.powi(i as i32)).collect();
        let table = rope_table(&Device::Cpu, &frequencies, 20, DType::F32).unwrap();
        let (rows, heads) = (7, 3);
        for dtype in [DType::F32, DType::BF16] {
            let x = normals("x", &[rows, heads * head_dim + 8], dtype);
            let at = positions(rows, rows, 5);
            let layout = RopeLayout { heads, head_dim, pairs };
            parity(&[x.clone(), table.clone(), at.clone()], Tolerance::Exact, |t| {
                let rotate = |rotation| -> Result<Tensor> {
                    let mut y = t[0].duplicate()?;
                    rope(&mut y, angles(&t[1], &t[2]), layout, rotation)?;
                    Ok(y)
                };
                Ok(vec![rotate(Rotation::Forward)?, rotate(Rotation::Backward)?])
            });
            let mut whole = x.duplicate().unwrap();
            rope(&mut whole, angles(&table, &at), layout, Rotation::Forward).unwrap();
            let (before, after) = (values(&x), values(&whole));
            let width = heads * head_dim + 8;
            for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
                let at_head = row * width + head * head_dim;
                let part = |from: &[f64]| from[at_head..at_head + rotated].to_vec();
                let values_of_part: Vec<f32> = part(&before).into_iter().map(|v| v as f32).collect();
                let alone = Tensor::from_slice(&Device::Cpu, &[1, rotated], &values_of_part).unwrap();
                let mut alone = crate::ops::cast(&alone, dtype).unwrap();
                let one = RopeLayout { heads: 1, head_dim: rotated, pairs };
                rope(&mut alone, angles(&table, &at.rows(row, row + 1).unwrap()), one, Rotation::Forward).unwrap();
                assert_eq!(part(&after), values(&alone), "row {row}, head {head}, {pairs:?} {rotated} of {head_dim}");
                let rest = at_head + rotated..at_head + head_dim;
                assert_eq!(after[rest.clone()], before[rest], "row {row}, head {head}");
            }
        }
    }
}

#[test]
fn backward_inverts_forward_and_keeps_the_values() {
    let table = rope_table(&Device::Cpu, &[1.0, 0.3], 9, DType::F64).unwrap();
    let (layout, at) = (RopeLayout { heads: 2, head_dim: 4, pairs: RopePairs::Halves }, positions(6, 3, 6));
    let x = normals("x", &[6, 11], DType::F64);
    let mut y = x.duplicate().unwrap();
    rope(&mut y, angles(&table, &at), layout, Rotation::Forward).unwrap();
    assert_eq!(values(&y)[8..11], values(&x)[8..11], "columns beyond the heads stay");
    assert!((values(&y)[0] - values(&x)[0]).abs() > 1e-3, "position 6 is rotated");
    rope(&mut y, angles(&table, &at), layout, Rotation::Backward).unwrap();
    assert_close("there and back", &x, &y, Tolerance::Steps(DType::F64, 4.0));
}

#[test]
fn positions_beyond_the_table_are_an_error() {
    let table = rope_table(&Device::Cpu, &[1.0], 4, DType::F32).unwrap();
    let mut x = normals("x", &[3, 2], DType::F32);
    let layout = RopeLayout { heads: 1, head_dim: 2, pairs: RopePairs::Halves };
    for wrong in [[0, 4, 1], [0, -1, 1]] {
        let at = Tensor::from_slice(&Device::Cpu, &[3], &wrong).unwrap();
        let error = rope(&mut x, angles(&table, &at), layout, Rotation::Forward).unwrap_err().to_string();
        assert!(error.contains(&format!("position {}", wrong[1])), "{error}");
    }
    let short = positions(2, 3, 0);
    assert!(rope(&mut x, angles(&table, &short), layout, Rotation::Forward).is_err(), "a position for each row");
}

#[test]
fn rope_writes_to_every_destination() {
    // Heads that fill a tile, share a tile, or do not fit; matrices wider than the rotated heads and wider than two tiles.
    for (head_dim, heads, width, rows) in
        [(128, 2, 384, 140), (64, 3, 320, 17), (16, 1, 16, 3), (128, 1, 128, 129), (6, 2, 13, 9), (48, 2, 96, 20)]
    {
        let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| 0.9f64.powi(i as i32)).collect();
        let table = rope_table(&Device::Cpu, &frequencies, 60, DType::F32).unwrap();
        let pairs = |dtype| if dtype == DType::F32 { &PAIRS[..1] } else { &PAIRS[..] };
        let cases = [DType::F32, DType::F16, DType::BF16]
            .into_iter()
            .flat_map(|dtype| pairs(dtype).iter().map(move |&p| (dtype, p)));
        for (dtype, pairs) in cases {
            let layout = RopeLayout { heads, head_dim, pairs };
            let inputs = [hostile("x", &[rows, width], dtype), table.clone(), positions(rows, 50, 7)];
            for rotation in [Rotation::Forward, Rotation::Backward] {
                destinations(&inputs, |x, output| rope_to(&x[0], angles(&x[1], &x[2]), layout, rotation, output));
            }
        }
    }
}
