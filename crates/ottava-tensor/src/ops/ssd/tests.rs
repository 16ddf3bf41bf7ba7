mod chunked;
mod devices;

use super::*;
use crate::ops::cast;
use crate::testing::{assert_gradient, dot, dry_gpu, integers, largest_error, normals, values};
use crate::tracker::MemoryTracker;
use crate::{DType, Device};
use std::sync::Arc;

/// Two groups of two heads, and states that are larger than heads. Some time steps reach a limit.
const SPEC: SsdSpec = SsdSpec { heads: 4, groups: 2, head_dim: 3, state_dim: 5, dt_limits: [0.02, 4.0] };

/// Owns the inputs of a run.
#[derive(Clone)]
struct Inputs {
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
}

impl Inputs {
    fn new(tokens: usize, spec: &SsdSpec, dtype: DType) -> Inputs {
        // Projections of time steps of -6, which the lower limit replaces, -0.5, 2 and 5, which the upper limit replaces, or random ones.
        let choices = integers("choices", tokens * spec.heads, 6).to_vec::<i32>().unwrap();
        let random = values(&normals("dt", &[tokens, spec.heads], DType::F64));
        let of = |(choice, random): (i32, f64)| [-6.0, -0.5, 2.0, 5.0, random, random][choice as usize];
        let dt: Vec<f64> = choices.into_iter().zip(random).map(of).collect();
        let dt = Tensor::from_slice(&Device::Cpu, &[tokens, spec.heads], &dt).unwrap();
        let vector = |name| normals(name, &[spec.heads], real_type(dtype));
        Inputs {
            xbc: normals("xbc", &[tokens, spec.xbc_width()], dtype),
            dt: cast(&dt, dtype).unwrap(),
            a_log: vector("a_log"),
            dt_bias: vector("dt_bias"),
            d: vector("d"),
        }
    }

    fn of(&self) -> SsdInput<'_> {
        let Inputs { xbc, dt, a_log, dt_bias, d } = self;
        SsdInput { xbc, dt, a_log, dt_bias, d }
    }

    /// Returns the inputs with the rows that `of` returns.
    fn map(&self, of: impl Fn(&Tensor) -> Tensor) -> Inputs {
        Inputs { xbc: of(&self.xbc), dt: of(&self.dt), ..self.clone() }
    }
}

/// The gradients by all inputs.
struct Gradients {
    of: SsdGradient,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
}

fn backward(dy: &Tensor, inputs: &Inputs, segments: Segments, states: BoundaryStates) -> Gradients {
    let zeros = || Tensor::zeros(dy.device(), &[SPEC.heads], real_type(dy.dtype())).unwrap();
    let [mut a_log, mut dt_bias, mut d] = [(); 3].map(|()| zeros());
    let parameters = SsdParameterGradients { a_log: &mut a_log, dt_bias: &mut dt_bias, d: &mut d };
    let of = ssd_backward(dy, inputs.of(), &SPEC, segments, states, parameters).unwrap();
    Gradients { of, a_log, dt_bias, d }
}

fn states(name: &str, count: usize) -> Tensor {
    normals(name, &[&[count][..], &SPEC.state_shape()].concat(), DType::F64)
}

fn indices(values: &[i32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap()
}

/// Returns the output, and the states after the segments, which begin with the states `before`.
fn forward(inputs: &Inputs, of: Segments, before: &Tensor) -> (Tensor, Tensor) {
    let mut after = before.duplicate().unwrap();
    let count = before.shape()[0] as i32;
    let (slots, past) = (indices(&Vec::from_iter(0..count)), indices(&vec![1; count as usize]));
    let pool = SegmentStates { values: &mut after, slots: &slots, past: &past };
    let y = ssd(inputs.of(), &SPEC, of, Some(pool)).unwrap();
    (y, after)
}

#[test]
fn recurrence_and_chunks_agree() {
    for tokens in [1, 63, 64, 65, 200] {
        let inputs = Inputs::new(tokens, &SPEC, DType::F64);
        let [before, gradient] = ["before", "after"].map(|name| states(name, 1));
        let dy = normals("dy", &[tokens, SPEC.width()], DType::F64);
        let (y, after) = forward(&inputs, Segments::Even(1), &before);
        let bounds = BoundaryStates { before: Some(&before), gradient: Some(&gradient) };
        let found = backward(&dy, &inputs, Segments::Even(1), bounds);
        let of = &found.of;
        let found = [&y, &after, &of.xbc, &of.dt, of.before.as_ref().unwrap(), &found.a_log, &found.dt_bias, &found.d];
        let found = found.map(values);
        let Inputs { xbc, dt, a_log, dt_bias, d } = &inputs;
        let [xbc, dt, a_log, dt_bias, d, before, dy, gradient] =
            [xbc, dt, a_log, dt_bias, d, &before, &dy, &gradient].map(values);
        for size in [1, 7, 16, 64] {
            let inputs = chunked::Inputs { xbc: &xbc, dt: &dt, a_log: &a_log, dt_bias: &dt_bias, d: &d };
            let expected = chunked::run(&inputs, &before, [&dy, &gradient], &SPEC, size);
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = largest_error(found, expected);
                assert!(error < 1e-12, "result {i} of {tokens} tokens in chunks of {size}: {error:e}");
            }
        }
    }
}

#[test]
fn backward_is_the_gradient() {
    // Two segments, and a row of padding.
    let (tokens, at) = (70, indices(&[0, 3, 69]));
    let (inputs, segments) = (Inputs::new(tokens, &SPEC, DType::F64), Segments::At(&at));
    let [before, gradient] = ["before", "after"].map(|name| states(name, 2));
    let dy = normals("dy", &[tokens, SPEC.width()], DType::F64);
    let loss = |inputs: &Inputs, before: &Tensor| {
        let (y, after) = forward(inputs, segments, before);
        dot(&values(&y), &values(&dy)) + dot(&values(&after), &values(&gradient))
    };
    let bounds = BoundaryStates { before: Some(&before), gradient: Some(&gradient) };
    let found = backward(&dy, &inputs, segments, bounds);
    let all = [
        ("xbc", &inputs.xbc, &found.of.xbc),
        ("dt", &inputs.dt, &found.of.dt),
        ("a_log", &inputs.a_log, &found.a_log),
        ("dt_bias", &inputs.dt_bias, &found.dt_bias),
        ("d", &inputs.d, &found.d),
    ];
    for (name, input, gradient) in all {
        assert_gradient(name, input, gradient, |changed| {
            let mut inputs = inputs.clone();
            *match name {
                "xbc" => &mut inputs.xbc,
                "dt" => &mut inputs.dt,
                "a_log" => &mut inputs.a_log,
                "dt_bias" => &mut inputs.dt_bias,
                _ => &mut inputs.d,
            } = changed.clone();
            loss(&inputs, &before)
        });
    }
    assert_gradient("before", &before, &found.of.before.unwrap(), |before| loss(&inputs, before));
}

#[test]
fn packed_documents_have_the_bits_of_single_documents() {
    let (bounds, at) = ([0, 70, 72, 133], indices(&[0, 70, 72, 133, 133]));
    for dtype in [DType::F32, DType::BF16] {
        let inputs = Inputs::new(133, &SPEC, dtype);
        let dy = normals("dy", &[133, SPEC.width()], dtype);
        let all = ssd(inputs.of(), &SPEC, Segments::At(&at), None).unwrap();
        let packed = backward(&dy, &inputs, Segments::At(&at), BoundaryStates::default()).of;
        for pair in bounds.windows(2) {
            let part = |x: &Tensor| x.rows(pair[0], pair[1]).unwrap();
            let (of_document, one) = (inputs.map(part), Segments::Even(1));
            let alone = ssd(of_document.of(), &SPEC, one, None).unwrap();
            assert_eq!(values(&part(&all)), values(&alone), "{pair:?} in {dtype}");
            let alone = backward(&part(&dy), &of_document, one, BoundaryStates::default()).of;
            for (packed, alone) in [(&packed.xbc, &alone.xbc), (&packed.dt, &alone.dt)] {
                assert_eq!(values(&part(packed)), values(alone), "gradients of {pair:?} in {dtype}");
            }
        }
    }
}

/// Runs two sequences in pieces, whose states are in a pool beside other states, and runs them whole.
#[test]
fn pieces_with_states_have_the_bits_of_whole_sequences() {
    for dtype in [DType::F32, DType::BF16] {
        let inputs = Inputs::new(40, &SPEC, dtype);
        let whole = ssd(inputs.of(), &SPEC, Segments::Even(2), None).unwrap();
        for piece in [1, 3, 7, 20] {
            // The slots hold states of other sequences at first.
            let mut pool = cast(&states("pool", 4), DType::F32).unwrap();
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
                let of_pool = SegmentStates { values: &mut pool, slots: &slots, past: &past };
                let y = ssd(inputs.map(of).of(), &SPEC, Segments::Even(2), Some(of_pool)).unwrap();
                assert_eq!(values(&y), values(&of(&whole)), "tokens from {start} in pieces of {piece}, {dtype}");
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
    let of = |x: &Tensor| Tensor::empty(&device, x.shape(), x.dtype()).unwrap();
    let inputs = Inputs::new(130, &SPEC, DType::BF16);
    let Inputs { xbc, dt, a_log, dt_bias, d } = &inputs;
    let inputs = Inputs { xbc: of(xbc), dt: of(dt), a_log: of(a_log), dt_bias: of(dt_bias), d: of(d) };
    let live = tracker.take_peak().bytes;
    let y = ssd(inputs.of(), &SPEC, Segments::Even(2), None).unwrap();
    assert!(tracker.take_peak().bytes > live + 2 * y.bytes());
    let d = backward(&y, &inputs, Segments::Even(2), BoundaryStates::default()).of;
    assert_eq!((d.xbc.shape(), d.xbc.dtype()), (inputs.xbc.shape(), DType::BF16));
    assert!(tracker.take_peak().bytes > live + y.bytes() + d.xbc.bytes() + 130 * SPEC.xbc_width() * 4);
}

#[test]
fn misfits_are_errors() {
    let inputs = Inputs::new(8, &SPEC, DType::F32);
    let run =
        |spec: &SsdSpec, segments: Segments| ssd(inputs.of(), spec, segments, None).map(drop).unwrap_err().to_string();
    assert!(run(&SsdSpec { groups: 3, ..SPEC }, Segments::Even(1)).contains("a multiple of the groups"));
    for dt_limits in [[-1.0, 1.0], [2.0, 1.0], [0.0, f64::NAN]] {
        assert!(run(&SsdSpec { dt_limits, ..SPEC }, Segments::Even(1)).contains("limits of time steps ascend"));
    }
    assert!(run(&SsdSpec { heads: 2, ..SPEC }, Segments::Even(1)).contains("has shape"));
    assert!(run(&SPEC, Segments::Even(3)).contains("8 rows do not divide into 3 segments"));
    assert!(run(&SPEC, Segments::At(&indices(&[]))).contains("there are none; N segments have N + 1 offsets"));
    let wrong = Inputs { d: normals("d", &[4], DType::BF16), ..inputs.clone() };
    assert!(ssd(wrong.of(), &SPEC, Segments::Even(1), None).is_err());
    let wide = SsdSpec { heads: 1, groups: 1, head_dim: 1, state_dim: 257, ..SPEC };
    let gpu = dry_gpu();
    let [xbc, dt, vector] =
        [[1, 515].as_slice(), &[1, 1], &[1]].map(|shape| Tensor::zeros(&gpu, shape, DType::F32).unwrap());
    let input = SsdInput { xbc: &xbc, dt: &dt, a_log: &vector, dt_bias: &vector, d: &vector };
    let error = ssd(input, &wide, Segments::Even(1), None).map(drop).unwrap_err().to_string();
    assert!(error.contains("states of 257 columns; a GPU has kernels for up to 256"), "{error}");
    let mut pool = cast(&states("pool", 2), DType::F32).unwrap();
    let (slots, past) = (indices(&[1, 1]), indices(&[0, 0]));
    let of_pool = SegmentStates { values: &mut pool, slots: &slots, past: &past };
    let error = ssd(inputs.of(), &SPEC, Segments::Even(2), Some(of_pool)).map(drop).unwrap_err().to_string();
    assert!(error.contains("two segments have the state in slot 1"), "{error}");
}
