use super::*;
use crate::testing::{Tolerance, assert_gradient, dot, gpu, normals, parity, values};
use crate::{DType, Device};

fn indices(values: &[i32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap()
}

fn inputs(tokens: usize, channels: usize, taps: usize, dtype: DType) -> [Tensor; 3] {
    let x = normals("x", &[tokens, channels], dtype);
    [x, normals("weight", &[channels, 1, taps], dtype), normals("bias", &[channels], dtype)]
}

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(&Device::Cpu, shape, dtype).unwrap()
}

/// Returns the CPU, and the GPU if this machine has one.
fn devices() -> impl Iterator<Item = Device> {
    [Some(Device::Cpu), gpu()].into_iter().flatten()
}

/// Returns offsets of segments in `rows` rows: empty segments, segments that are shorter than the taps, segments that are longer than a strip of rows
/// of a GPU, and five rows of padding.
fn offsets(rows: usize) -> Vec<i32> {
    let mut at = vec![0];
    for len in [0, 1, 3, 2, 0, 0, 29, 1, 1, 200, 2].into_iter().cycle() {
        let next = at[at.len() - 1] + len;
        if next + 5 > rows as i32 {
            return at;
        }
        at.push(next);
    }
    unreachable!("the lengths repeat")
}

/// The numbers of rows and channels. Channels fill eights or not, and fill several blocks of a GPU. Thread blocks of a GPU divide more rows into longer
/// strips.
const SIZES: [[usize; 2]; 8] = [[6, 1], [40, 8], [37, 19], [9, 2056], [7, 2051], [2300, 8], [8600, 5], [34_000, 8]];

/// Returns the tolerance for results in `dtype`, and for sums over rows.
fn tolerance(dtype: DType) -> Tolerance {
    // The exponentials of CPU and GPU differ in the last bits, and rows are summed in another order.
    Tolerance::Steps(dtype, if dtype == DType::F32 { 64.0 } else { 1.0 })
}

#[test]
fn causal_conv_agrees_across_devices() {
    let cases = SIZES.into_iter().zip([4, 1, 2, 3, 4].into_iter().cycle());
    for (([rows, channels], taps), dtype) in
        cases.flat_map(|case| [DType::F32, DType::F16, DType::BF16].map(|dtype| (case, dtype)))
    {
        if rows > 10_000 && dtype != DType::BF16 {
            continue;
        }
        let [x, weight, bias] = inputs(rows, channels, taps, dtype);
        let even = [3, 2, 1].into_iter().find(|count| rows.is_multiple_of(*count)).unwrap();
        let inputs = [x, weight, bias, normals("dy", &[rows, channels], dtype), indices(&offsets(rows))];
        for (is_even, has_bias) in [(true, false), (false, true)] {
            parity(&inputs, tolerance(dtype), |t| {
                let segments = if is_even { Segments::Even(even) } else { Segments::At(&t[4]) };
                let weights = ConvWeights { weight: &t[1], bias: has_bias.then_some(&t[2]) };
                let zeros = |shape: &[usize]| Tensor::zeros(t[0].device(), shape, DType::F32);
                let (mut dweight, mut dbias) = (zeros(&[channels, 1, taps])?, zeros(&[channels])?);
                let y = causal_conv(&t[0], weights, segments, None)?;
                let of_bias = has_bias.then_some(&mut dbias);
                let dx = causal_conv_backward(&t[3], &t[0], weights, segments, &mut dweight, of_bias)?;
                Ok(vec![y, dx, dweight, dbias])
            });
        }
    }
}

#[test]
fn states_agree_across_devices() {
    for ([rows, channels], taps) in SIZES.into_iter().flat_map(|size| [4, 2].map(|taps| (size, taps))) {
        let dtype = if channels == 8 { DType::BF16 } else { DType::F32 };
        let [x, weight, bias] = inputs(rows, channels, taps, dtype);
        let at = offsets(rows);
        let count = at.len() - 1;
        // Every third sequence is new, and slots are in another order than segments.
        let past: Vec<i32> = (0..count as i32).map(|n| n % 3 * 5).collect();
        let slots: Vec<i32> = (0..count as i32).rev().collect();
        let pool = normals("pool", &[count + 1, taps - 1, channels], dtype);
        let inputs = [x, weight, bias, indices(&at), indices(&slots), indices(&past), pool];
        let run = |t: &[Tensor]| -> Result<[Tensor; 2]> {
            let mut pool = t[6].duplicate()?;
            let states = SegmentStates { values: &mut pool, slots: &t[4], past: &t[5] };
            let weights = ConvWeights { weight: &t[1], bias: Some(&t[2]) };
            let y = causal_conv(&t[0], weights, Segments::At(&t[3]), Some(states))?;
            Ok([y, pool])
        };
        parity(&inputs, Tolerance::Exact, |t| Ok(vec![run(t)?[1].duplicate()?]));
        parity(&inputs, tolerance(dtype), |t| Ok(run(t)?.into()));
    }
}

#[test]
fn rows_sum_the_last_inputs_of_their_segment() {
    let at = indices(&[0, 2, 2, 9]);
    for (taps, has_bias) in [(1, true), (2, false), (3, true), (4, false), (4, true)] {
        let [x, weight, bias] = inputs(10, 3, taps, DType::F64);
        let weights = ConvWeights { weight: &weight, bias: has_bias.then_some(&bias) };
        let y = values(&causal_conv(&x, weights, Segments::At(&at), None).unwrap());
        let [x, weight, bias] = [&x, &weight, &bias].map(values);
        for (t, c) in (0..10).flat_map(|t| (0..3).map(move |c| (t, c))) {
            let first = if t < 2 { 0 } else { 2 };
            let inputs = (0..taps).filter_map(|i| Some((i, (t + i + 1).checked_sub(taps)?)));
            let sum: f64 = inputs.filter(|(_, s)| *s >= first).map(|(i, s)| weight[c * taps + i] * x[s * 3 + c]).sum();
            let p = sum + if has_bias { bias[c] } else { 0.0 };
            let expected = if t == 9 { 0.0 } else { p / (1.0 + (-p).exp()) };
            assert!((y[t * 3 + c] - expected).abs() < 1e-14, "row {t}, channel {c}, {taps} taps");
        }
    }
}

#[test]
fn backward_is_the_gradient() {
    // More rows than a partial sum has, a segment that is shorter than the taps, and padding.
    let at = indices(&[0, 68, 70, 76]);
    for taps in [2, 4] {
        let [x, weight, bias] = inputs(77, 3, taps, DType::F64);
        let dy = normals("dy", &[77, 3], DType::F64);
        let (mut dweight, mut dbias) = (zeros(&[3, 1, taps], DType::F64), zeros(&[3], DType::F64));
        let segments = Segments::At(&at);
        let loss = |x: &Tensor, weight: &Tensor, bias: &Tensor| {
            let y = causal_conv(x, ConvWeights { weight, bias: Some(bias) }, segments, None).unwrap();
            dot(&values(&y), &values(&dy))
        };
        let weights = ConvWeights { weight: &weight, bias: Some(&bias) };
        let dx = causal_conv_backward(&dy, &x, weights, segments, &mut dweight, Some(&mut dbias)).unwrap();
        assert_gradient("x", &x, &dx, |x| loss(x, &weight, &bias));
        assert_gradient("weight", &weight, &dweight, |weight| loss(&x, weight, &bias));
        assert_gradient("bias", &bias, &dbias, |bias| loss(&x, &weight, bias));
    }
}

#[test]
fn packed_documents_have_the_bits_of_single_documents() {
    let (bounds, at) = ([0, 70, 72, 133], indices(&[0, 70, 72, 133, 133]));
    for (device, dtype) in devices().flat_map(|device| [DType::F32, DType::BF16].map(|dtype| (device.clone(), dtype))) {
        let [x, weight, _] = inputs(133, 5, 4, dtype).map(|x| x.to_device(&device).unwrap());
        let at = at.to_device(&device).unwrap();
        let weights = ConvWeights { weight: &weight, bias: None };
        let run = |x: &Tensor, of: Segments| {
            let mut dweight = zeros(&[5, 1, 4], DType::F32).to_device(&device).unwrap();
            let y = causal_conv(x, weights, of, None).unwrap();
            [causal_conv_backward(x, x, weights, of, &mut dweight, None).unwrap(), y]
        };
        let all = run(&x, Segments::At(&at));
        for pair in bounds.windows(2) {
            let part = |x: &Tensor| x.rows(pair[0], pair[1]).unwrap();
            let alone = run(&part(&x), Segments::Even(1));
            assert_eq!(
                all.each_ref().map(part).map(|x| values(&x)),
                alone.map(|x| values(&x)),
                "{pair:?} in {dtype} on {device:?}"
            );
        }
    }
}

/// Runs two sequences in pieces, whose states are in a pool beside other states, and runs them whole.
#[test]
fn pieces_with_states_have_the_bits_of_whole_sequences() {
    let cases = [(DType::F32, 4), (DType::BF16, 4), (DType::F32, 1), (DType::F32, 2)];
    for (device, (dtype, taps)) in devices().flat_map(|device| cases.map(|case| (device.clone(), case))) {
        let on_device = |x: Tensor| x.to_device(&device).unwrap();
        let [x, weight, bias] = inputs(40, 5, taps, dtype).map(on_device);
        let weights = ConvWeights { weight: &weight, bias: Some(&bias) };
        let whole = causal_conv(&x, weights, Segments::Even(2), None).unwrap();
        for piece in [1, 2, 3, 7, 20] {
            let mut pool = on_device(normals("pool", &[4, taps - 1, 5], dtype));
            let untouched = values(&pool.rows(1, 3).unwrap());
            let slots = on_device(indices(&[3, 0]));
            for start in (0..20).step_by(piece) {
                let len = piece.min(20 - start);
                let of = |x: &Tensor| {
                    let mut rows = Tensor::empty(&device, &[2 * len, 5], dtype).unwrap();
                    rows.copy_from(0, &x.rows(start, start + len).unwrap()).unwrap();
                    rows.copy_from(len, &x.rows(20 + start, 20 + start + len).unwrap()).unwrap();
                    rows
                };
                let past = on_device(indices(&[start as i32; 2]));
                let states = SegmentStates { values: &mut pool, slots: &slots, past: &past };
                let y = causal_conv(&of(&x), weights, Segments::Even(2), Some(states)).unwrap();
                assert_eq!(values(&y), values(&of(&whole)), "tokens from {start} in pieces of {piece}, {dtype}");
            }
            assert_eq!(values(&pool.rows(1, 3).unwrap()), untouched, "slots of other sequences");
        }
    }
}

#[test]
fn misfits_are_errors() {
    let [x, weight, _] = inputs(8, 3, 4, DType::F32);
    let weights = ConvWeights { weight: &weight, bias: None };
    let five = normals("weight", &[3, 1, 5], DType::F32);
    let run = |weights, of| causal_conv(&x, weights, of, None).map(drop).unwrap_err().to_string();
    assert!(run(ConvWeights { weight: &five, bias: None }, Segments::Even(1)).contains("5 taps; 1 to 4"));
    assert!(run(ConvWeights { bias: Some(&weight), ..weights }, Segments::Even(1)).contains("bias has shape"));
    assert!(run(weights, Segments::Even(3)).contains("8 rows do not divide into 3 segments"));
    let (mut dweight, mut dbias) = (zeros(&[3, 1, 4], DType::F32), zeros(&[3], DType::F32));
    let backward = causal_conv_backward(&x, &x, weights, Segments::Even(1), &mut dweight, Some(&mut dbias));
    assert!(backward.unwrap_err().to_string().contains("are given together"));
    let (mut pool, index) = (zeros(&[2, 3, 4], DType::F32), indices(&[0]));
    let states = SegmentStates { values: &mut pool, slots: &index, past: &index };
    let error = causal_conv(&x, weights, Segments::Even(1), Some(states)).unwrap_err().to_string();
    assert!(error.contains("states has shape"), "{error}");
}
