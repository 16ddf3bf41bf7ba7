use super::*;
use crate::ops::destination::tests::hostile;
use crate::ops::quantize::{Copies, CurrentScaling, raise_amax};
use crate::ops::{Fp8Output, amax, cast};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};

const HOW: AdamW =
    AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1, max_norm: 1.0, loss_scale: 1.0 };

/// The op with scalars as a step sets them.
fn update(parameters: &mut [AdamWParameter], seen: &mut CastStatistics, norm: &Tensor, how: &AdamW) {
    let mut scalars = AdamWScalars::new(norm.device()).unwrap();
    scalars.set(how).unwrap();
    adamw(parameters, seen, norm, &scalars).unwrap();
}

/// The same without casts.
fn plain_update(parameters: &mut [AdamWParameter], norm: &Tensor, how: &AdamW) {
    update(parameters, &mut CastStatistics::new(norm.device(), 1).unwrap(), norm, how);
}

/// How the tensors of a parameter are stored; `None` for the weight means by chance.
#[derive(Clone, Copy)]
struct Stored {
    copy: Option<DType>,
    states: DType,
    grad: DType,
}

const PLAIN: Stored = Stored { copy: Some(DType::BF16), states: DType::F32, grad: DType::F32 };

/// `count` updates of parameters with the weights and gradients in `inputs`, by turns, and the norm at the end.
fn steps(inputs: &[Tensor], count: u64, stored: Stored) -> Result<Vec<Tensor>> {
    let (norm, pairs) = inputs.split_last().expect("a norm");
    let device = norm.device();
    let mut tensors = Vec::new();
    for pair in pairs.chunks(2) {
        let shape = pair[0].shape();
        let zeros = |dtype| Tensor::zeros(device, shape, dtype);
        let weight = match stored.copy {
            Some(copy) => [pair[0].duplicate()?, zeros(copy)?],
            None => [zeros(DType::F32)?, cast(&pair[0], DType::BF16)?],
        };
        tensors.push((weight, zeros(stored.states)?, zeros(stored.states)?, cast(&pair[1], stored.grad)?));
    }
    for step in 1..=count {
        let mut parameters = Vec::new();
        for (i, (weight, m, v, grad)) in tensors.iter_mut().enumerate() {
            let [master, copy] = weight;
            let weight = match stored.copy {
                Some(_) => AdamWWeight::Master { master, copy: (i % 3 != 1).then_some(copy) },
                None => AdamWWeight::Stochastic { weight: copy, seed: i as u64 },
            };
            let weight_decay = if i % 2 == 0 { 0.1 } else { 0.0 };
            parameters.push(AdamWParameter { weight, m, v, grad, weight_decay, cast: None });
        }
        plain_update(&mut parameters, norm, &AdamW { step, ..HOW });
    }
    Ok(tensors.into_iter().flat_map(|([master, copy], m, v, _)| [master, m, v, copy]).collect())
}

fn inputs(sizes: &[usize], norm: f32) -> Vec<Tensor> {
    let pair = |&n: &usize| [normals("w", &[n], DType::F32), normals("g", &[n], DType::F32)];
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[norm]).unwrap();
    sizes.iter().flat_map(pair).chain([norm]).collect()
}

#[test]
fn adamw_agrees_across_devices() {
    for copy in [Some(DType::BF16), Some(DType::F16), None] {
        for states in [DType::F32, DType::BF16] {
            for grad in [DType::F32, DType::BF16] {
                let inputs = inputs(&[1, 257, 10_000, 16_384, 16_385, 40_003], 3.7);
                parity(&inputs, Tolerance::Exact, |x| steps(x, 3, Stored { copy, states, grad }));
            }
        }
    }
}

/// Moments and gradients of all magnitudes, zero among them: the GPU takes short cuts where none is out of the ordinary.
#[test]
fn every_magnitude_is_divided_alike() {
    let n = 1 << 19;
    let powers = |name: &str, range: f32| {
        let x = ["mantissa", "exponent"].map(|part| normals(&format!("{name} {part}"), &[n], DType::F32));
        let x = x.map(|x| x.to_vec::<f32>().unwrap());
        let mut x: Vec<f32> = x[0].iter().zip(&x[1]).map(|(x, e)| x * (e * range).exp2()).collect();
        // Alone, and where a whole row has never had a gradient.
        let zero = |i: usize| i % 61 == name.len() || (name != "weights" && (i / 8).is_multiple_of(7));
        x.iter_mut().enumerate().filter(|(i, _)| zero(*i)).for_each(|(_, x)| *x = 0.0);
        Tensor::from_slice(&Device::Cpu, &[n], &x).unwrap()
    };
    for range in [0.0, 4.0, 20.0, 60.0] {
        let number = |x: f32| Tensor::from_slice(&Device::Cpu, &[1], &[x]).unwrap();
        let [w, m, root, g] = [("weights", range / 4.0), ("m", range), ("root", range), ("grad", range)]
            .map(|(name, range)| powers(name, range));
        let inputs = [w, m, squares(&root), g];
        let inputs: Vec<_> = inputs.into_iter().chain([number(0.3)]).collect();
        for (beta2, epsilon) in [(0.95, 1e-8), (0.999, 0.0), (0.5, 3.0), (1.0 - 1e-14, 1e-8)] {
            parity(&inputs, Tolerance::Exact, |x| {
                let [mut weight, mut m, mut v] = [x[0].duplicate()?, x[1].duplicate()?, x[2].duplicate()?];
                let weights = AdamWWeight::Master { master: &mut weight, copy: None };
                let parameter = AdamWParameter {
                    weight: weights,
                    m: &mut m,
                    v: &mut v,
                    grad: &x[3],
                    weight_decay: 0.1,
                    cast: None,
                };
                plain_update(&mut [parameter], &x[4], &AdamW { beta2, epsilon, step: 3, ..HOW });
                Ok([weight, m, v].iter().map(without_nan).collect())
            });
        }
    }
}

/// A power of two changes no digit, so it must not change any bit of the update either.
#[test]
fn a_loss_scale_is_taken_out_again() {
    let inputs = ["w", "m", "g"].map(|name| normals(name, &[700], DType::F32));
    for max_norm in [0.0, 1.0] {
        parity(&inputs, Tolerance::Exact, |x| {
            let updated = |loss_scale: f64| {
                let [mut weight, mut m, mut v] = [x[0].duplicate()?, x[1].duplicate()?, squares(&x[1])];
                let grad: Vec<f32> = x[2].to_vec::<f32>()?.iter().map(|g| g * loss_scale as f32).collect();
                let grad = Tensor::from_slice(x[2].device(), x[2].shape(), &grad)?;
                let norm = Tensor::from_slice(x[2].device(), &[1], &[30.0 * loss_scale as f32])?;
                let weights = AdamWWeight::Master { master: &mut weight, copy: None };
                let parameter = AdamWParameter {
                    weight: weights,
                    m: &mut m,
                    v: &mut v,
                    grad: &grad,
                    weight_decay: 0.1,
                    cast: None,
                };
                plain_update(&mut [parameter], &norm, &AdamW { max_norm, loss_scale, ..HOW });
                Ok::<_, crate::Error>([weight, m, v])
            };
            let plain = updated(1.0)?;
            for loss_scale in [65536.0, 0.125] {
                for (plain, scaled) in plain.iter().zip(updated(loss_scale)?) {
                    assert_close(&format!("loss scale {loss_scale}"), plain, &scaled, Tolerance::Exact);
                }
            }
            Ok(plain.to_vec())
        });
    }
}

/// NaN has other bits on other devices.
fn without_nan(x: &Tensor) -> Tensor {
    let values: Vec<f32> = x.to_vec::<f32>().unwrap().iter().map(|x| if x.is_nan() { 0.0 } else { *x }).collect();
    Tensor::from_slice(x.device(), x.shape(), &values).unwrap()
}

#[test]
fn more_parameters_than_one_launch_takes() {
    let sizes: Vec<usize> = (0..130).map(|i| i * i % 97).collect();
    parity(&inputs(&sizes, 0.5), Tolerance::Exact, |x| steps(x, 2, PLAIN));
}

#[test]
fn chance_rounds_to_a_neighbour_and_on_average_not_at_all() {
    // A third of the way from 1 to the next BF16, reached in one step from 1 by decay alone.
    let n = 30_000;
    let mut weight = cast(&Tensor::from_slice(&Device::Cpu, &[n], &vec![1f32; n]).unwrap(), DType::BF16).unwrap();
    let zeros = || Tensor::zeros(&Device::Cpu, &[n], DType::F32).unwrap();
    let (mut m, mut v, grad) = (zeros(), zeros(), zeros());
    let weight_decay = -1.0 / 3.0 / 128.0 / HOW.learning_rate;
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    let parameter = AdamWParameter {
        weight: AdamWWeight::Stochastic { weight: &mut weight, seed: 1 },
        m: &mut m,
        v: &mut v,
        grad: &grad,
        weight_decay,
        cast: None,
    };
    plain_update(&mut [parameter], &norm, &HOW);
    let up = values(&weight).iter().filter(|&&w| w == 1.0 + 1.0 / 128.0).count();
    assert!(values(&weight).iter().all(|&w| w == 1.0 || w == 1.0 + 1.0 / 128.0));
    // Four standard deviations.
    assert!((up as f64 / n as f64 - 1.0 / 3.0).abs() < 4.0 * (2.0 / 9.0 / n as f64).sqrt(), "{up} of {n}");
}

#[test]
fn ten_steps_follow_the_formula_in_f64() {
    let inputs = inputs(&[50], 4.0);
    let master = values(&steps(&inputs, 10, PLAIN).unwrap()[0]);
    for ((mut w, g), got) in values(&inputs[0]).into_iter().zip(values(&inputs[1])).zip(master) {
        let g = g / (4.0 + 1e-6);
        let (mut m, mut v) = (0.0, 0.0);
        for t in 1..=10 {
            w -= HOW.learning_rate * 0.1 * w;
            m = HOW.beta1 * m + (1.0 - HOW.beta1) * g;
            v = HOW.beta2 * v + (1.0 - HOW.beta2) * g * g;
            let (m, v) = (m / (1.0 - HOW.beta1.powi(t)), v / (1.0 - HOW.beta2.powi(t)));
            w -= HOW.learning_rate * m / (v.sqrt() + HOW.epsilon);
        }
        assert!((w - got).abs() < 1e-5 * w.abs().max(1.0), "{w} in F64, {got} here");
    }
}

#[test]
fn a_norm_that_is_not_finite_writes_nothing() {
    for norm in [f32::NAN, f32::INFINITY] {
        parity(&inputs(&[9], norm), Tolerance::Exact, |x| {
            let after = steps(x, 1, PLAIN)?;
            assert_eq!(values(&after[0]), values(&x[0]));
            assert!(values(&after[1]).iter().chain(&values(&after[2])).all(|&x| x == 0.0));
            Ok(after)
        });
    }
}

/// Weights of one parameter: the ones that are updated, and the copy, if one is kept.
fn weights(master: &Tensor, kind: Kind) -> [Option<Tensor>; 2] {
    let zeros = |dtype| Tensor::zeros(master.device(), master.shape(), dtype).unwrap();
    match kind {
        Kind::Master(copy) => [Some(master.duplicate().unwrap()), copy.map(zeros)],
        Kind::Stochastic => [Some(cast(master, DType::BF16).unwrap()), None],
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Master(Option<DType>),
    Stochastic,
}

fn squares(x: &Tensor) -> Tensor {
    let squares: Vec<f32> = x.to_vec::<f32>().unwrap().iter().map(|x| x * x).collect();
    Tensor::from_slice(x.device(), x.shape(), &squares).unwrap()
}

/// Scales of blocks of 128x128, or the given one.
fn scale_by(given: &Tensor, own: Option<CurrentScaling>) -> CastScale<'_> {
    own.map_or(CastScale::Given(given), |how| CastScale::Own(Granularity::Blocks128x128, how))
}

/// What a cast of `x` alone gives.
fn cast_by(
    x: &Tensor,
    format: DType,
    scale: CastScale,
    copies: Copies,
    statistics: &mut CastStatistics,
    slot: usize,
) -> QuantizedTensor {
    Fp8Output { format, scale, copies, statistics, slot }.cast(x).unwrap()
}

/// One parameter on one device, with what its update is to make of the weights.
struct Case {
    kind: Kind,
    weights: [Option<Tensor>; 2],
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    amax: Tensor,
    codes: Option<QuantizedTensor>,
}

impl Case {
    fn new(device: &Device, shape: &[usize], kind: Kind, states: DType, grad: DType) -> Case {
        let there = |x: Tensor, dtype| cast(&x.to_device(device).unwrap(), dtype).unwrap();
        let master = there(hostile("weights", shape, DType::F32), DType::F32);
        Case {
            kind,
            weights: weights(&master, kind),
            m: there(normals("m", shape, DType::F32), states),
            v: there(squares(&normals("v", shape, DType::F32)), states),
            grad: there(normals("grad", shape, DType::F32), grad),
            amax: Tensor::from_slice(device, &[1], &[0.25f32]).unwrap(),
            codes: None,
        }
    }

    /// Codes of zeros, by another scale than the coming one, or by those of blocks: nothing of them may remain.
    fn with_codes(mut self, format: DType, copies: Copies, own: Option<CurrentScaling>) -> Case {
        let old = Tensor::zeros(self.grad.device(), self.grad.shape(), DType::F32).unwrap();
        let two = Tensor::from_slice(self.grad.device(), &[1], &[2f32]).unwrap();
        let mut unread = CastStatistics::new(self.grad.device(), 1).unwrap();
        self.codes = Some(cast_by(&old, format, scale_by(&two, own), copies, &mut unread, 0));
        self
    }

    fn parameter<'a>(&'a mut self, seed: u64, cast: Option<(CastScale<'a>, usize)>) -> AdamWParameter<'a> {
        let [weight, copy] = &mut self.weights;
        let weight = weight.as_mut().unwrap();
        let weight = match self.kind {
            Kind::Master(_) => AdamWWeight::Master { master: weight, copy: copy.as_mut() },
            Kind::Stochastic => AdamWWeight::Stochastic { weight, seed },
        };
        let cast = match (&mut self.codes, cast) {
            (Some(into), Some((scale, slot))) => Some(WeightCast::Codes { scale, slot, into }),
            (None, Some(_)) => Some(WeightCast::Amax(&mut self.amax)),
            (_, None) => None,
        };
        AdamWParameter { weight, m: &mut self.m, v: &mut self.v, grad: &self.grad, weight_decay: 0.1, cast }
    }

    fn read(&self) -> &Tensor {
        self.weights.iter().flatten().next_back().unwrap()
    }

    /// All that an update writes.
    fn written(&self) -> Vec<Tensor> {
        let scales =
            |q: &QuantizedTensor| [q.scale_inv.clone()].into_iter().chain(q.transposed_scale_inv.as_deref().cloned());
        let codes = |q: &QuantizedTensor| q.codes.clone().into_iter().chain(q.transposed.clone());
        let copies = self.codes.iter().flat_map(|q| codes(q).chain(scales(q)));
        self.weights.iter().flatten().chain([&self.m, &self.v, &self.amax]).cloned().chain(copies).collect()
    }
}

fn measured(seen: &CastStatistics) -> Vec<Tensor> {
    [&seen.amax, &seen.saturated, &seen.underflowed, &seen.elements].map(Tensor::clone).to_vec()
}

fn compare(what: &str, expected: &[Tensor], got: &[Tensor]) {
    assert_eq!(expected.len(), got.len(), "{what}");
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        assert_close(&format!("{what}, part {i}"), expected, got, Tolerance::Exact);
    }
}

/// On every device and among several parameters at once: an update that casts writes what one that does not writes, and what
/// `quantize`, or `quantize_blocks` with scales of its own, and `amax` then make of its weights.
fn casts_as_it_goes(
    shapes: &[[usize; 2]],
    kind: Kind,
    [states, grad, format]: [DType; 3],
    copies: Copies,
    own: Option<CurrentScaling>,
) {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let what = format!("{kind:?}, {states} states, {grad} gradient, {format} {copies:?} {own:?} on {device}");
        let number = |x: f32| Tensor::from_slice(&device, &[1], &[x]).unwrap();
        let (norm, scales) = (number(3.7), [number(300.0), number(1e-3), number(0.37)]);
        let cases = || shapes.iter().map(|shape| Case::new(&device, shape, kind, states, grad));
        let mut plain: Vec<Case> = cases().collect();
        // Every fourth is measured only.
        let casting = |i: usize| i % 4 != 3;
        let mut fused: Vec<Case> =
            cases().enumerate().map(|(i, c)| if casting(i) { c.with_codes(format, copies, own) } else { c }).collect();
        let slots = 2 * shapes.len();
        let [mut expected, mut seen] = [(); 2].map(|()| CastStatistics::new(&device, slots).unwrap());
        for step in 1..=2 {
            let how = AdamW { step, ..HOW };
            let scale = |i: usize| scale_by(&scales[(i + step as usize) % 3], own);
            let mut parameters: Vec<_> = plain.iter_mut().zip(0..).map(|(c, i)| c.parameter(i, None)).collect();
            plain_update(&mut parameters, &norm, &how);
            for (i, case) in plain.iter_mut().enumerate() {
                let read = case.read().clone();
                if casting(i) {
                    case.codes = Some(cast_by(&read, format, scale(i), copies, &mut expected, 2 * i + 1));
                } else {
                    raise_amax(&read, &mut case.amax).unwrap();
                }
            }
            let parameters = fused.iter_mut().enumerate();
            let mut parameters: Vec<_> =
                parameters.map(|(i, c)| c.parameter(i as u64, Some((scale(i), 2 * i + 1)))).collect();
            update(&mut parameters, &mut seen, &norm, &how);
            for (i, (plain, fused)) in plain.iter().zip(&fused).enumerate() {
                compare(&format!("{:?}, {what}", shapes[i]), &plain.written(), &fused.written());
            }
            compare(&format!("statistics, {what}"), &measured(&expected), &measured(&seen));
        }
    }
}

const SHAPES: [[usize; 2]; 11] =
    [[1, 1], [3, 7], [16, 16], [63, 65], [129, 200], [257, 391], [1, 128], [130, 8], [5, 1000], [400, 3], [0, 4]];

#[test]
fn codes_are_those_of_the_new_weights() {
    for kind in [Kind::Stochastic, Kind::Master(None), Kind::Master(Some(DType::BF16)), Kind::Master(Some(DType::F16))]
    {
        for states in [DType::F32, DType::BF16] {
            for grad in [DType::F32, DType::BF16] {
                for format in [DType::E4M3, DType::E5M2] {
                    casts_as_it_goes(&SHAPES, kind, [states, grad, format], Copies::Both, None);
                }
                let types = [states, grad, DType::E4M3];
                casts_as_it_goes(&SHAPES, kind, types, Copies::Both, Some(CurrentScaling::default()));
            }
        }
        let types = [DType::BF16, DType::BF16, DType::E4M3];
        for copies in [Copies::Rows, Copies::Columns] {
            casts_as_it_goes(&SHAPES, kind, types, copies, None);
            let how = CurrentScaling { epsilon: 1e-3, power_of_two: true };
            casts_as_it_goes(&SHAPES, kind, types, copies, Some(how));
        }
    }
}

#[test]
fn more_casts_than_one_launch_takes() {
    let shapes: Vec<[usize; 2]> = (0..110).map(|i| [i * i % 37, 1 + i * 7 % 150]).collect();
    casts_as_it_goes(&shapes, Kind::Stochastic, [DType::BF16, DType::BF16, DType::E4M3], Copies::Both, None);
}

#[test]
fn casts_agree_across_devices() {
    for kind in [Kind::Stochastic, Kind::Master(Some(DType::BF16))] {
        parity(&[Tensor::from_slice(&Device::Cpu, &[1], &[0.9f32]).unwrap()], Tolerance::Exact, |norm| {
            let device = norm[0].device();
            let scale = Tensor::from_slice(device, &[1], &[300f32])?;
            let mut seen = CastStatistics::new(device, 1)?;
            let mut case = Case::new(device, &[137, 72], kind, DType::BF16, DType::BF16);
            // NaN has other bits on other devices.
            case.weights = weights(&normals("weights", &[137, 72], DType::F32).to_device(device)?, kind);
            let mut case = case.with_codes(DType::E4M3, Copies::Both, None);
            update(&mut [case.parameter(5, Some((CastScale::Given(&scale), 0)))], &mut seen, &norm[0], &HOW);
            Ok(case.written().into_iter().chain(measured(&seen)).collect())
        });
    }
}

#[test]
fn a_norm_that_is_not_finite_casts_nothing() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let number = |x: f32| Tensor::from_slice(&device, &[1], &[x]).unwrap();
        let new = || Case::new(&device, &[20, 40], Kind::Stochastic, DType::F32, DType::F32);
        let all = |cases: &[Case; 2]| cases.iter().flat_map(Case::written).collect::<Vec<_>>();
        let [before, mut after] = [(); 2].map(|()| [new().with_codes(DType::E4M3, Copies::Both, None), new()]);
        let mut seen = CastStatistics::new(&device, 1).unwrap();
        let scale = number(1.0);
        let mut parameters: Vec<_> =
            after.iter_mut().map(|case| case.parameter(0, Some((CastScale::Given(&scale), 0)))).collect();
        update(&mut parameters, &mut seen, &number(f32::NAN), &HOW);
        compare("untouched", &all(&before), &all(&after));
        assert!(measured(&seen).iter().all(|t| t.read_bytes().unwrap().iter().all(|&byte| byte == 0)));
    }
}

#[test]
fn codes_of_another_matrix_are_an_error() {
    let number = |x: f32| Tensor::from_slice(&Device::Cpu, &[1], &[x]).unwrap();
    let (one, mut seen) = (number(1.0), CastStatistics::new(&Device::Cpu, 1).unwrap());
    let scalars = AdamWScalars::new(&Device::Cpu).unwrap();
    let new = |shape: &[usize]| Case::new(&Device::Cpu, shape, Kind::Stochastic, DType::F32, DType::F32);
    let mut case = new(&[2, 3]);
    case.codes = new(&[3, 2]).with_codes(DType::E4M3, Copies::Both, None).codes;
    let error =
        adamw(&mut [case.parameter(0, Some((CastScale::Given(&one), 0)))], &mut seen, &one, &scalars).unwrap_err();
    assert_eq!(error.to_string(), "adamw: grad has shape [2, 3], expected [3, 2]");
    let mut case = new(&[2, 3]).with_codes(DType::E4M3, Copies::Both, None);
    let error =
        adamw(&mut [case.parameter(0, Some((CastScale::Given(&one), 7)))], &mut seen, &one, &scalars).unwrap_err();
    assert_eq!(error.to_string(), "quantize: slot 7 of statistics with 1 entries");
    let mut case = new(&[2, 3]).with_codes(DType::E4M3, Copies::Both, None);
    let rows = CastScale::Own(Granularity::PerRow, CurrentScaling::default());
    let error = adamw(&mut [case.parameter(0, Some((rows, 0)))], &mut seen, &one, &scalars).unwrap_err();
    assert!(
        error.to_string().ends_with("codes with per-row scales of their own are cast after the update, not in it"),
        "{error}"
    );
}

/// What a recorded graph reads changes with the scalars, not with the launch.
#[test]
fn scalars_are_read_when_the_update_runs() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let number = |x: f32| Tensor::from_slice(&device, &[1], &[x]).unwrap();
        let new = || Case::new(&device, &[9, 9], Kind::Master(None), DType::F32, DType::F32);
        let (norm, mut seen) = (number(1.0), CastStatistics::new(&device, 1).unwrap());
        let (mut one, mut other) = (new(), new());
        let mut scalars = AdamWScalars::new(&device).unwrap();
        for step in 1..=3 {
            let how = AdamW { step, learning_rate: 1e-3 / step as f64, ..HOW };
            scalars.set(&how).unwrap();
            adamw(&mut [one.parameter(0, None)], &mut seen, &norm, &scalars).unwrap();
            plain_update(&mut [other.parameter(0, None)], &norm, &how);
        }
        compare("weights", &one.written(), &other.written());
        assert!(values(&amax(&one.m).unwrap())[0] > 0.0);
    }
}
