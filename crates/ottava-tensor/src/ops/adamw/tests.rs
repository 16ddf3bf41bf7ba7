mod fused_casts;
mod short_cuts;

use super::*;
use crate::MemoryKind;
use crate::cuda::{KernelModule, arch_of, compile_all};
use crate::ops::destination::tests::hostile;
use crate::ops::quantize::raise_amax;
use crate::ops::{CodeCopies, CurrentScaling, WeightCopy};
use crate::ops::{Fp8Output, amax, cast, scaled, unscaled};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};
use std::collections::HashSet;

const HOW: AdamW =
    AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1, max_norm: 1.0, gradient_scale: 1.0 };

/// Runs both passes with the scalars of a step.
fn update(parameters: &mut [AdamWParameter], seen: &mut CastStatistics, norm: &Tensor, how: &AdamW) {
    let mut scalars = AdamWScalars::new(norm.device()).unwrap();
    scalars.set(how).unwrap();
    adamw_amaxes(parameters, norm, &scalars).unwrap();
    adamw(parameters, seen, norm, &scalars).unwrap();
}

/// Runs an update without casts.
fn plain_update(parameters: &mut [AdamWParameter], norm: &Tensor, how: &AdamW) {
    update(parameters, &mut CastStatistics::new(norm.device(), 1).unwrap(), norm, how);
}

/// The storage format of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weights {
    /// F32 master weights, with a stored copy of this type.
    Master(Option<DType>),
    /// F32 or F16 master weights, with a copy of this type that is computed on demand.
    Made(DType),
    ScaledMade(DType),
    Scaled,
    Split,
    Stochastic,
}

/// The storage format of moments.
#[derive(Clone, Copy, Debug, PartialEq)]
enum States {
    Plain(DType),
    Scaled,
    Expanded,
}

use States::Plain;

/// The storage formats of one parameter.
#[derive(Clone, Copy, Debug)]
struct Stored {
    weights: Weights,
    states: States,
    grad: DType,
}

const PLAIN: Stored =
    Stored { weights: Weights::Master(Some(DType::BF16)), states: Plain(DType::F32), grad: DType::F32 };

/// The tensors of one parameter on one device, and the cast of its weights.
struct Case {
    stored: Stored,
    master: Tensor,
    scaled: ScaledTensor,
    copy: Tensor,
    rest: Tensor,
    moments: Moments,
    amaxes: Tensor,
    grad: Tensor,
    scaled_grad: ScaledTensor,
    amax: Tensor,
    codes: Option<QuantizedTensor>,
}

impl Case {
    /// Returns a case in which moments are zero.
    fn of(master: &Tensor, grad: &Tensor, stored: Stored) -> Case {
        let device = master.device();
        let zeros = |dtype| Tensor::zeros(device, master.shape(), dtype).unwrap();
        let copy = match stored.weights {
            Weights::Master(Some(copy)) => zeros(copy),
            Weights::Split | Weights::Stochastic => cast(master, DType::BF16).unwrap(),
            _ => zeros(DType::BF16),
        };
        let moments = match stored.states {
            Plain(dtype) => Moments::Plain { m: zeros(dtype), v: zeros(dtype) },
            States::Scaled => Moments::Scaled {
                m: ScaledTensor::zeros(device, master.shape(), DType::E4M3, MemoryKind::Device).unwrap(),
                v: ScaledTensor::zeros(device, master.shape(), DType::F16, MemoryKind::Device).unwrap(),
            },
            States::Expanded => Moments::Expanded {
                m: ExpandedTensor::zeros(device, master.shape(), MemoryKind::Device).unwrap(),
                v: ExpandedTensor::zeros(device, master.shape(), MemoryKind::Device).unwrap(),
            },
        };
        let plain_grad = if stored.grad == DType::E4M3 { DType::F32 } else { stored.grad };
        Case {
            stored,
            master: master.duplicate().unwrap(),
            scaled: scaled(master, DType::F16).unwrap(),
            copy,
            rest: zeros(DType::I16),
            moments,
            amaxes: Tensor::zeros(device, &[3], DType::F32).unwrap(),
            grad: cast(grad, plain_grad).unwrap(),
            scaled_grad: scaled(grad, DType::E4M3).unwrap(),
            amax: Tensor::from_slice(device, &[1], &[0.25f32]).unwrap(),
            codes: None,
        }
    }

    /// Returns a case with hostile values. Plain moments are nonzero.
    fn new(device: &Device, shape: &[usize], stored: Stored) -> Case {
        let there = |x: Tensor| x.to_device(device).unwrap();
        let master = there(hostile("weights", shape, DType::F32));
        let mut case = Case::of(&master, &there(normals("grad", shape, DType::F32)), stored);
        if let Plain(dtype) = stored.states {
            let [m, v] = [normals("m", shape, DType::F32), squares(&normals("v", shape, DType::F32))];
            let [m, v] = [m, v].map(|x| cast(&there(x), dtype).unwrap());
            case.moments = Moments::Plain { m, v };
        }
        case
    }

    /// Adds codes of zeros with another scale. The update must overwrite all of them.
    fn with_codes(mut self, format: DType, copies: CodeCopies, own: Option<CurrentScaling>) -> Case {
        let old = Tensor::zeros(self.grad.device(), self.grad.shape(), DType::F32).unwrap();
        let two = Tensor::from_slice(self.grad.device(), &[1], &[2f32]).unwrap();
        let mut unread = CastStatistics::new(self.grad.device(), 1).unwrap();
        self.codes = Some(cast_by(&old, format, scale_by(&two, own), copies, &mut unread, 0));
        self
    }

    /// Returns the parameter, with amaxes of zero.
    fn parameter<'a>(&'a mut self, seed: u64, cast: Option<(CastScale<'a>, usize)>) -> AdamWParameter<'a> {
        self.amaxes.fill_zero().unwrap();
        let Case { stored, master, scaled, copy, rest, moments, amaxes, .. } = self;
        let weight = match stored.weights {
            Weights::Master(Some(_)) => UpdatedWeight::Master { master, copy: WeightCopy::Stored(copy) },
            Weights::Master(None) => UpdatedWeight::Master { master, copy: WeightCopy::OnDemand(DType::F32) },
            Weights::Made(dtype) => UpdatedWeight::Master { master, copy: WeightCopy::OnDemand(dtype) },
            Weights::ScaledMade(dtype) => UpdatedWeight::Scaled { master: scaled, copy: WeightCopy::OnDemand(dtype) },
            Weights::Scaled => UpdatedWeight::Scaled { master: scaled, copy: WeightCopy::Stored(copy) },
            Weights::Split => UpdatedWeight::Split { weight: copy, rest },
            Weights::Stochastic => UpdatedWeight::Stochastic { weight: copy },
        };
        let cast = match (&mut self.codes, cast) {
            (Some(into), Some((scale, slot))) => Some(WeightCast::Codes { scale, slot, into }),
            (None, Some(_)) => Some(WeightCast::Amax(&mut self.amax)),
            (_, None) => None,
        };
        let grad = match stored.grad {
            DType::E4M3 => Gradient::Scaled(&self.scaled_grad),
            _ => Gradient::Plain(&self.grad),
        };
        AdamWParameter { weight, moments, grad, weight_decay: 0.1, seed, offset: 0, amaxes: Some(amaxes), cast }
    }

    /// Returns the weights in the type that layers read.
    fn read(&self) -> Tensor {
        match self.stored.weights {
            Weights::Master(None) => self.master.clone(),
            Weights::Made(dtype) => cast(&self.master, dtype).unwrap(),
            Weights::ScaledMade(dtype) => unscaled(&self.scaled, dtype).unwrap(),
            _ => self.copy.clone(),
        }
    }

    /// Returns all tensors that an update writes.
    fn written(&self) -> Vec<Tensor> {
        let scales =
            |q: &QuantizedTensor| [q.scale_inv.clone()].into_iter().chain(q.transposed_scale_inv.as_deref().cloned());
        let codes = |q: &QuantizedTensor| q.codes.clone().into_iter().chain(q.transposed.clone());
        let copies = self.codes.iter().flat_map(|q| codes(q).chain(scales(q)));
        let Case { master, scaled, copy, rest, amax, amaxes, .. } = self;
        let weights = [master, &scaled.values, &scaled.scale_inv, copy, rest, amax, amaxes];
        weights.into_iter().cloned().chain(moment_tensors(&self.moments)).chain(copies).collect()
    }
}

/// Returns the tensors of moments.
fn moment_tensors(moments: &Moments) -> Vec<Tensor> {
    match moments {
        Moments::Plain { m, v } => vec![m.clone(), v.clone()],
        Moments::Scaled { m, v } => [m, v].into_iter().flat_map(|x| [x.values.clone(), x.scale_inv.clone()]).collect(),
        Moments::Expanded { m, v } => [m, v].into_iter().flat_map(|x| [x.codes.clone(), x.groups.clone()]).collect(),
    }
}

/// Runs `count` updates of parameters whose weights and gradients alternate in `inputs`; the last input is the norm.
fn steps(inputs: &[Tensor], count: u64, stored: Stored) -> Vec<Tensor> {
    let (norm, pairs) = inputs.split_last().expect("a norm");
    let weights = |i: usize| match stored.weights {
        Weights::Master(Some(copy)) if i % 3 == 1 => Weights::Made(copy),
        other => other,
    };
    let cases = pairs.chunks(2).enumerate();
    let mut cases: Vec<Case> =
        cases.map(|(i, pair)| Case::of(&pair[0], &pair[1], Stored { weights: weights(i), ..stored })).collect();
    for step in 1..=count {
        let mut parameters: Vec<_> = cases.iter_mut().zip(0..).map(|(case, i)| case.parameter(i, None)).collect();
        let halves = parameters.iter_mut().skip(1).step_by(2);
        halves.for_each(|parameter| parameter.weight_decay = 0.0);
        plain_update(&mut parameters, norm, &AdamW { step, ..HOW });
    }
    cases.iter().flat_map(Case::written).collect()
}

fn inputs(sizes: &[[usize; 2]], norm: f32) -> Vec<Tensor> {
    let pair = |shape: &[usize; 2]| [normals("w", shape, DType::F32), normals("g", shape, DType::F32)];
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[norm]).unwrap();
    sizes.iter().flat_map(pair).chain([norm]).collect()
}

#[test]
fn adamw_agrees_across_devices() {
    let sizes = [1, 257, 10_000, 32_768, 32_769, 70_003].map(|n| [1, n]);
    let sizes = [&sizes[..], &[[3, 129], [5, 64], [130, 1000], [2, 33_000]]].concat();
    let grads = [DType::F32, DType::BF16, DType::E4M3];
    let with_grads = |weights, states| grads.map(|grad| Stored { weights, states, grad });
    let all =
        WEIGHTS.into_iter().flat_map(|weights| STATES.into_iter().flat_map(move |states| with_grads(weights, states)));
    let all: Vec<Stored> = all.collect();
    compile_for(all.iter().map(|stored| (*stored, None)));
    for stored in all {
        parity(&inputs(&sizes, 3.7), Tolerance::Exact, |x| Ok(steps(x, 3, stored)));
    }
}

/// Compiles on all cores the modules that updates and casts of `cases` launch. They are more than `kernels` lists, and would take minutes if each was
/// compiled at its first launch.
fn compile_for(cases: impl Iterator<Item = (Stored, Option<Codes>)>) {
    let Some(Device::Cuda(gpu)) = gpu() else { return };
    let scale = Tensor::zeros(&Device::Cpu, &[1], DType::F32).unwrap();
    let modules = cases.map(|(stored, codes)| {
        let mut case = Case::new(&Device::Cpu, &[1, 1], stored);
        if let Some(Codes { format, copies, own }) = codes {
            case = case.with_codes(format, copies, own);
        }
        cuda::module(&case.parameter(0, codes.map(|codes| (scale_by(&scale, codes.own), 0))))
    });
    let modules: HashSet<KernelModule> = modules.collect();
    drop(compile_all(&modules.into_iter().collect::<Vec<_>>(), &arch_of(gpu.capability())));
}

const WEIGHTS: [Weights; 7] = [
    Weights::Master(Some(DType::BF16)),
    Weights::Master(Some(DType::F16)),
    Weights::Master(None),
    Weights::ScaledMade(DType::BF16),
    Weights::Scaled,
    Weights::Split,
    Weights::Stochastic,
];

const STATES: [States; 4] = [Plain(DType::F32), Plain(DType::BF16), States::Scaled, States::Expanded];

/// A power-of-two loss scale must not change any bit of the update.
#[test]
fn a_power_of_two_gradient_scale_changes_no_bit() {
    let inputs = ["w", "m", "g"].map(|name| normals(name, &[700], DType::F32));
    for max_norm in [0.0, 1.0] {
        parity(&inputs, Tolerance::Exact, |x| {
            let updated = |gradient_scale: f64| {
                let grad: Vec<f32> = x[2].to_vec::<f32>()?.iter().map(|g| g * gradient_scale as f32).collect();
                let grad = Tensor::from_slice(x[2].device(), x[2].shape(), &grad)?;
                let norm = Tensor::from_slice(x[2].device(), &[1], &[30.0 * gradient_scale as f32])?;
                let mut case = Case::of(&x[0], &grad, Stored { weights: Weights::Master(None), ..PLAIN });
                case.moments = Moments::Plain { m: x[1].duplicate()?, v: squares(&x[1]) };
                plain_update(&mut [case.parameter(0, None)], &norm, &AdamW { max_norm, gradient_scale, ..HOW });
                Ok::<_, crate::Error>([vec![case.master], moment_tensors(&case.moments)].concat())
            };
            let plain = updated(1.0)?;
            for gradient_scale in [65536.0, 0.125] {
                for (plain, scaled) in plain.iter().zip(updated(gradient_scale)?) {
                    assert_close(&format!("gradient scale {gradient_scale}"), plain, &scaled, Tolerance::Exact);
                }
            }
            Ok(plain)
        });
    }
}

#[test]
fn many_parameters_take_several_launches() {
    let sizes: Vec<_> = (0..130).map(|i| [1, i * i % 97]).collect();
    for stored in [PLAIN, Stored { weights: Weights::Scaled, states: States::Scaled, grad: DType::E4M3 }] {
        parity(&inputs(&sizes, 0.5), Tolerance::Exact, |x| Ok(steps(x, 2, stored)));
    }
}

/// The bits do not depend on how a parameter is cut, although rounding depends on the index of an element and scales depend on all elements.
#[test]
fn slices_update_as_the_whole() {
    let bf16 = Stored { weights: Weights::Stochastic, states: Plain(DType::BF16), grad: DType::BF16 };
    let split = Stored { weights: Weights::Split, ..PLAIN };
    let scaled = Stored { weights: Weights::ScaledMade(DType::BF16), states: States::Scaled, grad: DType::F32 };
    let moments = Stored { weights: Weights::Stochastic, ..scaled };
    for stored in [PLAIN, bf16, split, Stored { states: States::Expanded, ..bf16 }, scaled, moments] {
        // Does three steps of slices of whole rows of 128 elements. Returns the stored tensors and the amaxes of all slices.
        let run = |x: &[Tensor], cuts: &[usize]| -> crate::Result<Vec<Tensor>> {
            let whole = Case::of(&x[0], &x[1], stored);
            let case = |cut: &[usize]| {
                let rows = |x: &Tensor| x.rows(cut[0], cut[1]).unwrap().duplicate().unwrap();
                let mut case = Case::of(&rows(&x[0]), &rows(&x[1]), stored);
                // A slice of the values of the whole parameter.
                let ScaledTensor { values, scale_inv } = &whole.scaled;
                case.scaled = ScaledTensor { values: rows(values), scale_inv: scale_inv.duplicate().unwrap() };
                (cut[0] * 128, case)
            };
            let mut cases: Vec<_> = cuts.windows(2).map(case).collect();
            let mut largest = vec![0f32; 3];
            for step in 1..=3 {
                let mut scalars = AdamWScalars::new(x[0].device())?;
                scalars.set(&AdamW { step, ..HOW })?;
                let slices = cases.iter_mut();
                let mut slices: Vec<_> = slices
                    .map(|(offset, case)| AdamWParameter { offset: *offset, ..case.parameter(5, None) })
                    .collect();
                adamw_amaxes(&mut slices, &x[2], &scalars)?;
                largest = vec![0f32; 3];
                for slice in &slices {
                    let found = slice.amaxes.as_deref().expect("cases have amaxes").to_vec::<f32>()?;
                    largest.iter_mut().zip(found).for_each(|(largest, found)| *largest = largest.max(found));
                }
                for slice in &mut slices {
                    slice.amaxes.as_deref_mut().expect("as above").write_bytes(bytemuck::cast_slice(&largest))?;
                }
                adamw(&mut slices, &mut CastStatistics::new(x[0].device(), 1)?, &x[2], &scalars)?;
            }
            // Returns tensors with one entry per element, and scales. Entries of slices are concatenated, and all slices must have the same scales.
            let kept = |case: &Case| match stored.states {
                States::Scaled => {
                    [vec![case.read(), case.scaled.values.clone()], moment_tensors(&case.moments)].concat()
                }
                _ => vec![case.read()],
            };
            let mut all: Vec<Vec<f64>> = kept(&cases[0].1).iter().map(values).collect();
            for (_, case) in &cases[1..] {
                for (all, more) in all.iter_mut().zip(kept(case)) {
                    match more.len() {
                        1 => assert_eq!(*all, values(&more), "{stored:?}"),
                        _ => all.extend(values(&more)),
                    }
                }
            }
            let tensor = |x: Vec<f64>| {
                Tensor::from_slice(whole.grad.device(), &[x.len()], &x.iter().map(|x| *x as f32).collect::<Vec<_>>())
            };
            let largest = largest.into_iter().map(f64::from).collect();
            all.into_iter().chain([largest]).map(tensor).collect()
        };
        let mut inputs = inputs(&[[296, 128]], 1.0);
        // Slices with different amaxes.
        let graded = |x: &Tensor| {
            let x: Vec<f32> = x.to_vec::<f32>().unwrap();
            x.iter().enumerate().map(|(i, x)| x * ((i / 128) as f32 / 20.0).exp2()).collect::<Vec<_>>()
        };
        for x in &mut inputs[..2] {
            *x = Tensor::from_slice(&Device::Cpu, &[296, 128], &graded(x)).unwrap();
        }
        parity(&inputs, Tolerance::Exact, |x| {
            let whole = run(x, &[0, 296])?;
            compare(&format!("{stored:?}"), &whole, &run(x, &[0, 1, 100, 296])?);
            Ok(whole)
        });
    }
}

#[test]
fn stochastic_rounding_is_unbiased() {
    // Weight decay alone moves a weight of 1 by a third of the distance to the next BF16 value.
    let n = 30_000;
    let ones = Tensor::from_slice(&Device::Cpu, &[n], &vec![1f32; n]).unwrap();
    let zeros = Tensor::zeros(&Device::Cpu, &[n], DType::F32).unwrap();
    let mut case = Case::of(&ones, &zeros, Stored { weights: Weights::Stochastic, ..PLAIN });
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    let weight_decay = -1.0 / 3.0 / 128.0 / HOW.learning_rate;
    plain_update(&mut [AdamWParameter { weight_decay, ..case.parameter(1, None) }], &norm, &HOW);
    let weight = case.copy;
    let up = values(&weight).iter().filter(|&&w| w == 1.0 + 1.0 / 128.0).count();
    assert!(values(&weight).iter().all(|&w| w == 1.0 || w == 1.0 + 1.0 / 128.0));
    // Four standard deviations.
    assert!((up as f64 / n as f64 - 1.0 / 3.0).abs() < 4.0 * (2.0 / 9.0 / n as f64).sqrt(), "{up} of {n}");
}

#[test]
fn ten_steps_follow_the_formula_in_f64() {
    let inputs = inputs(&[[1, 50]], 4.0);
    let master = values(&steps(&inputs, 10, PLAIN)[0]);
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
        // Ten updates in F32 round the weight and both moments, each with a relative error of 2⁻²⁴. Errors of up to 9e-7 were seen.
        assert!((w - got).abs() < 1e-5 * w.abs().max(1.0), "{w} in F64, {got} here");
    }
}

#[test]
fn a_non_finite_norm_writes_nothing() {
    for norm in [f32::NAN, f32::INFINITY] {
        for (weights, states) in WEIGHTS.into_iter().zip(STATES.into_iter().cycle()) {
            let stored = Stored { weights, states, grad: DType::F32 };
            parity(&inputs(&[[1, 9]], norm), Tolerance::Exact, |x| {
                let after = steps(x, 1, stored);
                compare(&format!("{stored:?}"), &Case::of(&x[0], &x[1], stored).written(), &after);
                Ok(after)
            });
        }
    }
}

fn squares(x: &Tensor) -> Tensor {
    let squares: Vec<f32> = x.to_vec::<f32>().unwrap().iter().map(|x| x * x).collect();
    Tensor::from_slice(x.device(), x.shape(), &squares).unwrap()
}

/// Returns scales of 128x128 blocks, or the given scale.
fn scale_by(given: &Tensor, own: Option<CurrentScaling>) -> CastScale<'_> {
    own.map_or(CastScale::Given(given), |how| CastScale::Own(Granularity::Blocks128x128, how))
}

/// Returns the result of a separate cast of `x`.
fn cast_by(
    x: &Tensor,
    format: DType,
    scale: CastScale,
    copies: CodeCopies,
    statistics: &mut CastStatistics,
    slot: usize,
) -> QuantizedTensor {
    Fp8Output { format, scale, copies, statistics, slot }.cast(x).unwrap()
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

/// The cast of weights to `format`: with scales of 128x128 blocks if `own` is set, otherwise with one given scale.
#[derive(Clone, Copy)]
struct Codes {
    format: DType,
    copies: CodeCopies,
    own: Option<CurrentScaling>,
}

#[test]
fn scales_without_amaxes_are_an_error() {
    let one = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    let scalars = AdamWScalars::new(&Device::Cpu).unwrap();
    for stored in [Stored { weights: Weights::Scaled, ..PLAIN }, Stored { states: States::Scaled, ..PLAIN }] {
        let mut case = Case::new(&Device::Cpu, &[2, 3], stored);
        let parameter = AdamWParameter { amaxes: None, ..case.parameter(0, None) };
        let error = adamw_amaxes(&mut [parameter], &one, &scalars).unwrap_err();
        assert_eq!(error.to_string(), "adamw: weights or moments with one scale have no amaxes to find it from");
    }
}

/// A replayed graph reads the current scalars.
#[test]
fn replayed_graphs_read_the_current_scalars() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let number = |x: f32| Tensor::from_slice(&device, &[1], &[x]).unwrap();
        let new = || Case::new(&device, &[9, 9], PLAIN);
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
        assert!(values(&amax(&moment_tensors(&one.moments)[0]).unwrap())[0] > 0.0);
    }
}
