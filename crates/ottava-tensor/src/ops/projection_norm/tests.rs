use super::*;
use crate::Device;
use crate::ops::{NormBackward, NormWeights, Output, norm_backward, norm_to};
use crate::testing::{Tolerance, normals, parity, values};

const KINDS: [NormKind; 2] = [NormKind::Rms, NormKind::RmsPlusOne];

fn layout(queries: usize, keys: usize, kind: NormKind) -> ProjectionNormLayout {
    ProjectionNormLayout { queries, keys, kind, eps: 1e-6, ranks: 1 }
}

/// Returns `x`, `dy` and the weights.
fn inputs(rows: usize, layout: ProjectionNormLayout, dtype: DType) -> [Tensor; 4] {
    let shape = [rows, layout.queries + 2 * layout.keys];
    [
        normals("x", &shape, dtype),
        normals("dy", &shape, dtype),
        normals("q", &[layout.queries], dtype),
        normals("k", &[layout.keys], dtype),
    ]
}

/// Returns `y`, `dx`, `dq` and `dk`. Sums are multiplied by the number of ranks, as if all ranks had the same values.
fn results(t: &[Tensor], layout: ProjectionNormLayout) -> Result<Vec<Tensor>> {
    let weights = HeadNormWeights { q: &t[2], k: &t[3] };
    let times_ranks = |x: Tensor| {
        let all = values(&x).iter().map(|x| x * layout.ranks as f64).collect::<Vec<_>>();
        let all = Tensor::from_slice(&Device::Cpu, x.shape(), &all)?;
        crate::ops::cast(&all, x.dtype())?.to_device(x.device())
    };
    let squares = times_ranks(projection_squares(&t[0], layout)?)?;
    let dots = times_ranks(projection_dots(&t[1], &t[0], weights, layout, &squares)?)?;
    let zeros = |len| Tensor::zeros(t[0].device(), &[len], sums_dtype(&t[0]));
    let (mut dq, mut dk) = (zeros(layout.queries)?, zeros(layout.keys)?);
    let y = projection_norm(&t[0], weights, layout, &squares)?;
    let sums = ProjectionSums { squares: &squares, dots: &dots };
    let dx = projection_norm_backward(&t[1], &t[0], weights, layout, sums, &mut dq, &mut dk)?;
    Ok(vec![y, dx, dq, dk])
}

#[test]
fn projection_norm_agrees_across_devices() {
    let sizes = [(1, 8, 8), (7, 48, 16), (33, 256, 128), (130, 2048, 1024), (5, 512, 256), (9, 18, 18), (3, 160, 80)];
    for ((rows, queries, keys), kind) in sizes.into_iter().flat_map(|sizes| KINDS.map(|kind| (sizes, kind))) {
        let layout = layout(queries, keys, kind);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Sums in another order move a rounding by one step. The gradient of a weight sums many rows.
            let steps = if dtype == DType::F32 { 64.0 } else { 1.0 };
            parity(&inputs(rows, layout, dtype), Tolerance::Steps(dtype, steps), |t| results(t, layout));
        }
    }
}

/// All queries are normalised like one row of RMSNorm, and all keys like another row. Values do not change.
#[test]
fn projections_are_normalised_as_rows() {
    for kind in KINDS {
        let layout = layout(30, 20, kind);
        let all = inputs(4, layout, DType::F64);
        let found = results(&all, layout).unwrap();
        let [x, dy] = [&all[0], &all[1]].map(values);
        for (columns, weight, found_dweight) in [(0..30, &all[2], &found[2]), (30..50, &all[3], &found[3])] {
            let part = |x: &[f64]| {
                let part: Vec<f64> = x.chunks(70).flat_map(|row| row[columns.clone()].to_vec()).collect();
                Tensor::from_slice(&Device::Cpu, &[4, columns.len()], &part).unwrap()
            };
            let weights = NormWeights { kind, weight, bias: None };
            let (y, statistics) = norm_to(&part(&x), weights, layout.eps, Output::Plain).unwrap();
            let mut dweight = Tensor::zeros(&Device::Cpu, &[columns.len()], DType::F64).unwrap();
            let dx = norm_backward(&part(&dy), &part(&x), weights, &statistics, &mut dweight, NormBackward::default())
                .unwrap();
            assert_eq!(values(&part(&values(&found[0]))), values(&y.plain().unwrap()), "{kind:?}");
            assert_eq!(values(&part(&values(&found[1]))), values(&dx), "{kind:?}");
            assert_eq!(values(found_dweight), values(&dweight), "{kind:?}");
        }
        for (found, whole) in [(&found[0], x), (&found[1], dy)] {
            for (found, whole) in values(found).chunks(70).zip(whole.chunks(70)) {
                assert_eq!(found[50..], whole[50..]);
            }
        }
    }
}

/// A rank's results equal the results of a row that repeats the rank's part once for each rank.
#[test]
fn ranks_share_one_mean() {
    let repeated = |x: &Tensor, widths: &[usize]| {
        let (rows, width) = (x.len() / widths.iter().sum::<usize>(), widths.iter().sum::<usize>());
        let twice = |row: &[f64]| {
            let mut at = 0;
            let mut whole = Vec::new();
            for width in widths {
                whole.extend(row[at..at + width].iter().chain(&row[at..at + width]));
                at += width;
            }
            whole
        };
        let whole: Vec<f64> = values(x).chunks(width).flat_map(twice).collect();
        let shape: &[usize] = if x.shape().len() == 1 { &[2 * width] } else { &[rows, 2 * width] };
        Tensor::from_slice(&Device::Cpu, shape, &whole).unwrap()
    };
    let own = layout(12, 8, NormKind::Rms);
    let all = inputs(5, own, DType::F64);
    let row: &[usize] = &[12, 8, 8];
    let whole = [(0, row), (1, row), (2, &[12][..]), (3, &[8])].map(|(i, widths)| repeated(&all[i], widths));
    let expected = results(&whole, layout(24, 16, NormKind::Rms)).unwrap();
    let found = results(&all, ProjectionNormLayout { ranks: 2, ..own }).unwrap();
    for (found, (expected, widths)) in found.iter().zip(expected.iter().zip([row, row, &[12], &[8]])) {
        let found = values(&repeated(found, widths));
        for (found, expected) in found.iter().zip(values(expected)) {
            // Means of up to 12 and 24 squares in F64 differ by some units of 2⁻⁵³ of values near 1; up to 1e-15 was seen.
            assert!((found - expected).abs() < 1e-12, "{found} instead of {expected}");
        }
    }
}

#[test]
fn misfits_are_errors() {
    let fits = layout(30, 20, NormKind::Rms);
    let [x, dy, q, k] = inputs(4, fits, DType::F32);
    let weights = HeadNormWeights { q: &q, k: &k };
    let squares = projection_squares(&x, fits).unwrap();
    assert!(projection_squares(&x, layout(20, 20, NormKind::Rms)).is_err());
    assert!(projection_norm(&x, weights, layout(30, 20, NormKind::Layer), &squares).is_err());
    assert!(projection_norm(&x, HeadNormWeights { q: &k, k: &q }, fits, &squares).is_err());
    assert!(projection_norm(&x, weights, fits, &q).is_err());
    assert!(projection_dots(&q, &x, weights, fits, &squares).is_err());
    assert!(projection_dots(&dy, &x, weights, fits, &squares).is_ok());
}
