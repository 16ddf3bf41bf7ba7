//! The kernels against the CPU reference.

use super::*;
use crate::testing::{Tolerance, parity};

/// Heads that fill no block, and last the heads that the kernels of chunks support.
const SPECS: [DeltaSpec; 4] = [
    SPEC,
    DeltaSpec { key_heads: 1, value_heads: 1, key_dim: 100, value_dim: 40 },
    DeltaSpec { key_heads: 2, value_heads: 2, key_dim: 64, value_dim: 96 },
    DeltaSpec { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 128 },
];

/// Segments without rows, with one row, and with rows that fill no tile, then rows of padding.
const BOUNDS: [i32; 7] = [0, 1, 1, 70, 134, 262, 301];
const ROWS: usize = 305;

fn tolerance(dtype: DType) -> Tolerance {
    // Sums in another order. Chunks round normalised queries and keys, states, and all other operands to BF16: on an H200, results differ by up to 9
    // steps of their root mean square, and by 4e-3 of their norm (`scripts/check_delta_kernels.py`).
    match dtype {
        DType::F32 => Tolerance::Steps(dtype, 256.0),
        _ => Tolerance::Steps(dtype, 16.0),
    }
}

#[test]
fn the_recurrence_agrees_across_devices() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        SPECS[..3].iter().for_each(|spec| compare(spec, dtype));
    }
    [DType::F32, DType::F16].into_iter().for_each(|dtype| compare(&SPECS[3], dtype));
}

#[test]
fn chunks_agree_across_devices() {
    compare(&SPECS[3], DType::BF16);
}

/// Compares forward, and backward with and without states.
fn compare(spec: &DeltaSpec, dtype: DType) {
    let (qkv, gates) = inputs(ROWS, spec, dtype);
    let d_o = normals("d_o", &[ROWS, spec.value_width()], dtype);
    let count = BOUNDS.len() - 1;
    let of_states = |name| crate::ops::cast(&states(name, count, spec), DType::F32).unwrap();
    let (before, after) = (of_states("before"), of_states("after"));
    let tensors = [qkv, gates.g, gates.beta, d_o, before, after, indices(&BOUNDS)];
    parity(&tensors, tolerance(dtype), |t| {
        let gates = DeltaGates { g: t[1].clone(), beta: t[2].clone() };
        let at = Segments::At(&t[6]);
        let o = gated_delta_rule(&t[0], &gates, spec, at, None)?;
        let states = BoundaryStates { before: Some(&t[4]), gradient: Some(&t[5]) };
        let d = gated_delta_rule_backward(&t[3], &t[0], &gates, spec, at, states)?;
        let plain = gated_delta_rule_backward(&t[3], &t[0], &gates, spec, at, BoundaryStates::default())?;
        let mut results = vec![o, d.qkv, d.gates.g, d.gates.beta, plain.qkv, plain.gates.g, plain.gates.beta];
        results.extend(d.before);
        Ok(results)
    });
}

#[test]
fn states_agree_across_devices() {
    for (spec, dtype) in SPECS.iter().flat_map(|spec| [DType::F32, DType::BF16].map(|dtype| (spec, dtype))) {
        let (qkv, gates) = inputs(ROWS, spec, dtype);
        let pool = crate::ops::cast(&states("pool", 8, spec), DType::F32).unwrap();
        // The state of the slot 3 is not read, and other sequences have the slots 6 and 7.
        let tensors = [
            qkv,
            gates.g,
            gates.beta,
            pool,
            indices(&BOUNDS),
            indices(&[5, 3, 0, 1, 2, 4]),
            indices(&[9, 0, 1, 7, 70, 3]),
        ];
        parity(&tensors, tolerance(dtype), |t| {
            let gates = DeltaGates { g: t[1].clone(), beta: t[2].clone() };
            let mut pool = t[3].duplicate()?;
            let states = SegmentStates { values: &mut pool, slots: &t[5], past: &t[6] };
            let o = gated_delta_rule(&t[0], &gates, spec, Segments::At(&t[4]), Some(states))?;
            Ok(vec![o, pool])
        });
    }
}

/// A row's bits depend neither on the division of its sequence into segments with states, nor on other segments.
#[test]
fn pieces_with_states_have_the_bits_of_whole_sequences_on_a_gpu() {
    let Some(gpu) = crate::testing::gpu() else { return };
    for spec in SPECS {
        let (qkv, gates) = inputs(40, &spec, DType::BF16);
        let [qkv, g, beta] = [&qkv, &gates.g, &gates.beta].map(|x| x.to_device(&gpu).unwrap());
        let pool = crate::ops::cast(&states("pool", 2, &spec), DType::F32).unwrap().to_device(&gpu).unwrap();
        let run = |piece: usize| {
            let (mut pool, mut rows) = (pool.duplicate().unwrap(), Vec::new());
            let slots = indices(&[1]).to_device(&gpu).unwrap();
            for start in (0..40).step_by(piece) {
                let of = |x: &Tensor| x.rows(start, 40.min(start + piece)).unwrap().duplicate().unwrap();
                let past = indices(&[start as i32]).to_device(&gpu).unwrap();
                let states = SegmentStates { values: &mut pool, slots: &slots, past: &past };
                let gates = DeltaGates { g: of(&g), beta: of(&beta) };
                rows.extend(values(
                    &gated_delta_rule(&of(&qkv), &gates, &spec, Segments::Even(1), Some(states)).unwrap(),
                ));
            }
            (rows, values(&pool))
        };
        let whole = run(40);
        for piece in [1, 7, 16, 20] {
            assert!(run(piece) == whole, "pieces of {piece} of {spec:?}");
        }
    }
}
