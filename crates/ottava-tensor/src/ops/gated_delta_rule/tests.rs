mod chunked;
mod devices;

use super::*;
use crate::testing::{assert_gradient, dot, dry_gpu, integers, largest_error, normals, values};
use crate::tracker::MemoryTracker;
use crate::{DType, Device};
use std::sync::Arc;

/// Value heads that share key heads, and values that are larger than keys.
const SPEC: DeltaSpec = DeltaSpec { key_heads: 2, value_heads: 4, key_dim: 3, value_dim: 5 };

/// Random inputs. Each gate `g` is 0, -0.001, -20 or random.
fn inputs(tokens: usize, spec: &DeltaSpec, dtype: DType) -> (Tensor, DeltaGates) {
    let shape = [tokens, spec.value_heads];
    let choices = integers("choices", tokens * spec.value_heads, 6).to_vec::<i32>().unwrap();
    let random = values(&normals("g", &shape, DType::F64));
    let of = |(choice, random): (i32, f64)| match choice {
        0 => 0.0,
        1 => -1e-3,
        2 => -20.0,
        _ => -random * random / 10.0,
    };
    let g: Vec<f64> = choices.into_iter().zip(random).map(of).collect();
    let beta = values(&normals("beta", &shape, DType::F64)).into_iter().map(|x| 1.0 / (1.0 + (-x).exp()));
    let gate = |values: &[f64]| {
        let gate = Tensor::from_slice(&Device::Cpu, &shape, values).unwrap();
        crate::ops::cast(&gate, real_type(dtype)).unwrap()
    };
    let gates = DeltaGates { g: gate(&g), beta: gate(&beta.collect::<Vec<_>>()) };
    (normals("qkv", &[tokens, spec.qkv_width()], dtype), gates)
}

fn states(name: &str, count: usize, spec: &DeltaSpec) -> Tensor {
    normals(name, &[&[count][..], &spec.state_shape()].concat(), DType::F64)
}

fn indices(values: &[i32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap()
}

/// Returns the output, and the states after the segments, which begin with the states `before`.
fn forward(qkv: &Tensor, gates: &DeltaGates, spec: &DeltaSpec, of: Segments, before: &Tensor) -> (Tensor, Tensor) {
    let mut after = before.duplicate().unwrap();
    let count = before.shape()[0] as i32;
    let (slots, past) = (indices(&Vec::from_iter(0..count)), indices(&vec![1; count as usize]));
    let pool = SegmentStates { values: &mut after, slots: &slots, past: &past };
    let o = gated_delta_rule(qkv, gates, spec, of, Some(pool)).unwrap();
    (o, after)
}

fn rows(gates: &DeltaGates, from: usize, to: usize) -> DeltaGates {
    DeltaGates { g: gates.g.rows(from, to).unwrap(), beta: gates.beta.rows(from, to).unwrap() }
}

#[test]
fn recurrence_and_chunks_agree() {
    for tokens in [1, 63, 64, 65, 200] {
        let (qkv, gates) = inputs(tokens, &SPEC, DType::F64);
        let [before, gradient] = ["before", "after"].map(|name| states(name, 1, &SPEC));
        let d_o = normals("d_o", &[tokens, SPEC.value_width()], DType::F64);
        let (o, after) = forward(&qkv, &gates, &SPEC, Segments::Even(1), &before);
        let bounds = BoundaryStates { before: Some(&before), gradient: Some(&gradient) };
        let d = gated_delta_rule_backward(&d_o, &qkv, &gates, &SPEC, Segments::Even(1), bounds).unwrap();
        let found = [&o, &after, &d.qkv, &d.gates.g, &d.gates.beta, d.before.as_ref().unwrap()].map(values);
        let [qkv, g, beta, before, d_o, gradient] = [&qkv, &gates.g, &gates.beta, &before, &d_o, &gradient].map(values);
        for size in [1, 7, 16, 64] {
            let expected = chunked::run([&qkv, &g, &beta, &before], [&d_o, &gradient], &SPEC, size);
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = largest_error(found, expected);
                assert!(error < 1e-11, "result {i} of {tokens} tokens in chunks of {size}: {error:e}");
            }
        }
    }
}

#[test]
fn backward_is_the_gradient() {
    // Two segments, and a row of padding.
    let (tokens, at) = (70, indices(&[0, 3, 69]));
    let (qkv, gates) = inputs(tokens, &SPEC, DType::F64);
    let segments = Segments::At(&at);
    let [before, gradient] = ["before", "after"].map(|name| states(name, 2, &SPEC));
    let d_o = normals("d_o", &[tokens, SPEC.value_width()], DType::F64);
    let loss = |qkv: &Tensor, gates: &DeltaGates, before: &Tensor| {
        let (o, after) = forward(qkv, gates, &SPEC, segments, before);
        dot(&values(&o), &values(&d_o)) + dot(&values(&after), &values(&gradient))
    };
    let bounds = BoundaryStates { before: Some(&before), gradient: Some(&gradient) };
    let d = gated_delta_rule_backward(&d_o, &qkv, &gates, &SPEC, segments, bounds).unwrap();
    assert_gradient("qkv", &qkv, &d.qkv, |qkv| loss(qkv, &gates, &before));
    let with_g = |g: &Tensor| DeltaGates { g: g.clone(), ..gates.clone() };
    assert_gradient("g", &gates.g, &d.gates.g, |g| loss(&qkv, &with_g(g), &before));
    let with_beta = |beta: &Tensor| DeltaGates { beta: beta.clone(), ..gates.clone() };
    assert_gradient("beta", &gates.beta, &d.gates.beta, |beta| loss(&qkv, &with_beta(beta), &before));
    assert_gradient("before", &before, &d.before.unwrap(), |before| loss(&qkv, &gates, before));
}

#[test]
fn packed_documents_have_the_bits_of_single_documents() {
    let (bounds, at) = ([0, 70, 72, 133], indices(&[0, 70, 72, 133, 133]));
    for dtype in [DType::F32, DType::BF16] {
        let (qkv, gates) = inputs(133, &SPEC, dtype);
        let d_o = normals("d_o", &[133, SPEC.value_width()], dtype);
        let all = gated_delta_rule(&qkv, &gates, &SPEC, Segments::At(&at), None).unwrap();
        let d =
            gated_delta_rule_backward(&d_o, &qkv, &gates, &SPEC, Segments::At(&at), BoundaryStates::default()).unwrap();
        for pair in bounds.windows(2) {
            let part = |x: &Tensor| x.rows(pair[0], pair[1]).unwrap();
            let (qkv, gates, d_o) = (part(&qkv), rows(&gates, pair[0], pair[1]), part(&d_o));
            let one = Segments::Even(1);
            let alone = gated_delta_rule(&qkv, &gates, &SPEC, one, None).unwrap();
            assert_eq!(values(&part(&all)), values(&alone), "{pair:?} in {dtype}");
            let of = gated_delta_rule_backward(&d_o, &qkv, &gates, &SPEC, one, BoundaryStates::default()).unwrap();
            for (packed, alone) in [(&d.qkv, &of.qkv), (&d.gates.g, &of.gates.g), (&d.gates.beta, &of.gates.beta)] {
                assert_eq!(values(&part(packed)), values(alone), "gradients of {pair:?} in {dtype}");
            }
        }
    }
}

/// Runs two sequences in pieces, whose states are in a pool beside other states, and runs them whole.
#[test]
fn pieces_with_states_have_the_bits_of_whole_sequences() {
    for dtype in [DType::F32, DType::BF16] {
        let (qkv, gates) = inputs(40, &SPEC, dtype);
        let whole = gated_delta_rule(&qkv, &gates, &SPEC, Segments::Even(2), None).unwrap();
        for piece in [1, 3, 7, 20] {
            // The slots hold states of other sequences at first.
            let mut pool = crate::ops::cast(&states("pool", 4, &SPEC), DType::F32).unwrap();
            let untouched = values(&pool.rows(1, 3).unwrap());
            let slots = indices(&[3, 0]);
            for start in (0..20).step_by(piece) {
                let len = piece.min(20 - start);
                let of = |x: &Tensor| {
                    let mut rows = Tensor::empty(&Device::Cpu, &[2 * len, x.shape()[1]], x.dtype()).unwrap();
                    for (n, first) in [start, 20 + start].into_iter().enumerate() {
                        rows.copy_from(n * len, &x.rows(first, first + len).unwrap()).unwrap();
                    }
                    rows
                };
                let past = indices(&[start as i32; 2]);
                let (qkv, gates) = (of(&qkv), DeltaGates { g: of(&gates.g), beta: of(&gates.beta) });
                let of_pool = SegmentStates { values: &mut pool, slots: &slots, past: &past };
                let o = gated_delta_rule(&qkv, &gates, &SPEC, Segments::Even(2), Some(of_pool)).unwrap();
                assert_eq!(values(&o), values(&of(&whole)), "tokens from {start} in pieces of {piece}, {dtype}");
            }
            assert_eq!(values(&pool.rows(1, 3).unwrap()), untouched, "slots of other sequences");
        }
    }
}

/// The memory of a run without data is the memory of its tensors, and at least the scratch of the CPU's reference.
#[test]
fn runs_without_data_count_memory() {
    let tracker = Arc::<MemoryTracker>::default();
    let device = Device::DryCpu(tracker.clone());
    let (qkv, gates) = inputs(130, &SPEC, DType::BF16);
    let of = |x: &Tensor| Tensor::empty(&device, x.shape(), x.dtype()).unwrap();
    let (qkv, gates) = (of(&qkv), DeltaGates { g: of(&gates.g), beta: of(&gates.beta) });
    let live = tracker.take_peak().bytes;
    let o = gated_delta_rule(&qkv, &gates, &SPEC, Segments::Even(2), None).unwrap();
    assert!(tracker.take_peak().bytes > live + 2 * o.bytes());
    let d = gated_delta_rule_backward(&o, &qkv, &gates, &SPEC, Segments::Even(2), BoundaryStates::default()).unwrap();
    assert_eq!((d.qkv.shape(), d.qkv.dtype()), (qkv.shape(), DType::BF16));
    assert!(tracker.take_peak().bytes > live + o.bytes() + d.qkv.bytes() + 130 * SPEC.qkv_width() * 4);
}

#[test]
fn misfits_are_errors() {
    let (qkv, gates) = inputs(8, &SPEC, DType::F32);
    let run = |spec: &DeltaSpec, segments: Segments| {
        gated_delta_rule(&qkv, &gates, spec, segments, None).map(drop).unwrap_err().to_string()
    };
    assert!(run(&DeltaSpec { key_heads: 3, ..SPEC }, Segments::Even(1)).contains("a multiple of the key heads"));
    assert!(run(&DeltaSpec { value_heads: 2, ..SPEC }, Segments::Even(1)).contains("has shape"));
    assert!(run(&SPEC, Segments::Even(3)).contains("8 rows do not divide into 3 segments"));
    assert!(run(&SPEC, Segments::Even(0)).contains("8 rows have no segment"));
    assert!(run(&SPEC, Segments::At(&indices(&[0, 5, 4]))).contains("a segment has the rows 5..4 of 8"));
    assert!(run(&SPEC, Segments::At(&indices(&[0, 9]))).contains("a segment has the rows 0..9 of 8"));
    let mut pool = crate::ops::cast(&states("pool", 2, &SPEC), DType::F32).unwrap();
    let mut with_slots = |slots: &[i32]| {
        let (slots, past) = (indices(slots), indices(&[0, 0]));
        let pool = SegmentStates { values: &mut pool, slots: &slots, past: &past };
        gated_delta_rule(&qkv, &gates, &SPEC, Segments::Even(2), Some(pool)).map(drop).unwrap_err().to_string()
    };
    assert!(with_slots(&[0, 2]).contains("slot 2 of a pool of 2 states"));
    assert!(with_slots(&[1, 1]).contains("two segments have the state in slot 1"));
    assert!(with_slots(&[-1, 1]).contains("slot -1"));
    let device = dry_gpu();
    let on_gpu = |x: &Tensor| x.to_device(&device).unwrap();
    assert!(gated_delta_rule(&on_gpu(&qkv), &gates, &SPEC, Segments::Even(1), None).is_err());
    let wide = DeltaSpec { key_heads: 1, value_heads: 1, key_dim: 129, value_dim: 1 };
    let (qkv, gates) = inputs(1, &wide, DType::F32);
    let gates = DeltaGates { g: on_gpu(&gates.g), beta: on_gpu(&gates.beta) };
    let error = gated_delta_rule(&on_gpu(&qkv), &gates, &wide, Segments::Even(1), None).unwrap_err().to_string();
    assert!(error.contains("keys of 129 elements; a GPU has kernels for up to 128"), "{error}");
}
