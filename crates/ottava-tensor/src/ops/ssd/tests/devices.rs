//! The kernels against the CPU reference.

use super::*;
use crate::testing::{Tolerance, parity};

const fn spec(heads: usize, groups: usize, head_dim: usize, state_dim: usize) -> SsdSpec {
    SsdSpec { heads, groups, head_dim, state_dim, dt_limits: [0.02, 4.0] }
}

/// Heads and states that fill no block, and last heads and states that the kernels of chunks support.
const SPECS: [SsdSpec; 5] = [SPEC, spec(2, 1, 40, 100), spec(4, 2, 33, 200), spec(6, 2, 64, 128), spec(2, 1, 64, 256)];

/// Segments without rows, with one row, and with rows that fill no tile, then rows of padding.
const BOUNDS: [i32; 7] = [0, 1, 1, 70, 134, 262, 301];
const ROWS: usize = 305;

fn tolerance(dtype: DType) -> Tolerance {
    // Sums in another order. Chunks round states and all other operands to BF16: on an H200, results differ by up to 3e-3 of their norm
    // (`scripts/check_ssd_kernels.py`).
    match dtype {
        DType::F32 => Tolerance::Steps(dtype, 512.0),
        _ => Tolerance::Steps(dtype, 16.0),
    }
}

#[test]
fn the_recurrence_agrees_across_devices() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        SPECS[..3].iter().for_each(|spec| compare(spec, dtype));
    }
    SPECS[3..].iter().for_each(|spec| compare(spec, DType::F32));
}

#[test]
fn chunks_agree_across_devices() {
    SPECS[3..].iter().for_each(|spec| compare(spec, DType::BF16));
}

/// Returns the tensors of inputs, then `more`.
fn tensors(inputs: &Inputs, more: Vec<Tensor>) -> Vec<Tensor> {
    let Inputs { xbc, dt, a_log, dt_bias, d } = inputs.clone();
    [vec![xbc, dt, a_log, dt_bias, d], more].concat()
}

fn inputs_of(t: &[Tensor]) -> SsdInput<'_> {
    SsdInput { xbc: &t[0], dt: &t[1], a_log: &t[2], dt_bias: &t[3], d: &t[4] }
}

fn in_f32(name: &str, count: usize, spec: &SsdSpec) -> Tensor {
    normals(name, &[&[count][..], &spec.state_shape()].concat(), DType::F32)
}

/// Compares forward, and backward with and without states.
fn compare(spec: &SsdSpec, dtype: DType) {
    let count = BOUNDS.len() - 1;
    let dy = normals("dy", &[ROWS, spec.width()], dtype);
    let more = vec![dy, in_f32("before", count, spec), in_f32("after", count, spec), indices(&BOUNDS)];
    parity(&tensors(&Inputs::new(ROWS, spec, dtype), more), tolerance(dtype), |t| {
        let at = Segments::At(&t[8]);
        let mut results = vec![ssd(inputs_of(t), spec, at, None)?];
        let states = BoundaryStates { before: Some(&t[6]), gradient: Some(&t[7]) };
        for states in [states, BoundaryStates::default()] {
            let zeros = || Tensor::zeros(t[0].device(), &[spec.heads], DType::F32);
            let [mut a_log, mut dt_bias, mut d] = [zeros()?, zeros()?, zeros()?];
            let parameters = SsdParameterGradients { a_log: &mut a_log, dt_bias: &mut dt_bias, d: &mut d };
            let SsdGradient { xbc, dt, before } = ssd_backward(&t[5], inputs_of(t), spec, at, states, parameters)?;
            results.extend([xbc, dt, a_log, dt_bias, d]);
            results.extend(before);
        }
        Ok(results)
    });
}

#[test]
fn states_agree_across_devices() {
    for (spec, dtype) in SPECS.iter().flat_map(|spec| [DType::F32, DType::BF16].map(|dtype| (spec, dtype))) {
        // The state of the slot 3 is not read, and other sequences have the slots 6 and 7.
        let (slots, past) = (indices(&[5, 3, 0, 1, 2, 4]), indices(&[9, 0, 1, 7, 70, 3]));
        let more = vec![in_f32("pool", 8, spec), indices(&BOUNDS), slots, past];
        parity(&tensors(&Inputs::new(ROWS, spec, dtype), more), tolerance(dtype), |t| {
            let mut pool = t[5].duplicate()?;
            let states = SegmentStates { values: &mut pool, slots: &t[7], past: &t[8] };
            let y = ssd(inputs_of(t), spec, Segments::At(&t[6]), Some(states))?;
            Ok(vec![y, pool])
        });
    }
}

/// A row's bits depend neither on the division of its sequence into segments with states, nor on other segments.
#[test]
fn pieces_with_states_have_the_bits_of_whole_sequences_on_a_gpu() {
    let Some(gpu) = crate::testing::gpu() else { return };
    for spec in SPECS {
        let inputs = tensors(&Inputs::new(40, &spec, DType::BF16), vec![in_f32("pool", 2, &spec)]);
        let inputs: Vec<Tensor> = inputs.iter().map(|x| x.to_device(&gpu).unwrap()).collect();
        let run = |piece: usize| {
            let (mut pool, mut rows) = (inputs[5].duplicate().unwrap(), Vec::new());
            let slots = indices(&[1]).to_device(&gpu).unwrap();
            for start in (0..40).step_by(piece) {
                let of = |x: &Tensor| x.rows(start, 40.min(start + piece)).unwrap().duplicate().unwrap();
                let (xbc, dt) = (of(&inputs[0]), of(&inputs[1]));
                let past = indices(&[start as i32]).to_device(&gpu).unwrap();
                let states = SegmentStates { values: &mut pool, slots: &slots, past: &past };
                let input = SsdInput { xbc: &xbc, dt: &dt, ..inputs_of(&inputs) };
                rows.extend(values(&ssd(input, &spec, Segments::Even(1), Some(states)).unwrap()));
            }
            (rows, values(&pool))
        };
        let whole = run(40);
        for piece in [1, 7, 16, 20] {
            assert!(run(piece) == whole, "pieces of {piece} of {spec:?}");
        }
    }
}
