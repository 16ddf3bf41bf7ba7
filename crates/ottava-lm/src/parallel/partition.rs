//! ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): which rank keeps and updates which part of a model's matrices.
//!
//! Each rank trains the whole model on rows of its own. Vectors (norms, biases) are so small that every rank updates all of them.

use super::DataParallel;
use super::slices::Slices;
use crate::error::{Error, Result};
use crate::mode::Mode;
use crate::models::Decoder;
use crate::optim::AdamWOptimizer;
use crate::param::{Grad, Param};
use crate::scaling::Casts;
use ottava_tensor::comm::Reduce;
use ottava_tensor::ops::{root_of_sum, sum_of_squares};
use ottava_tensor::{DType, QuantizedTensor, Tensor};
use serde::{Deserialize, Serialize};
use std::cell::{RefCell, RefMut};
use std::ops::Range;
use std::rc::Rc;

/// What ranks divide among each other instead of keeping all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Zero {
    /// Nothing.
    #[default]
    Nothing,
    /// Master weights and moments, and gradients once all micro-batches of a step have been added.
    OptimizerStates,
    /// Gradients of each micro-batch, too.
    Gradients,
    /// Weights and their codes, too: a unit's are gathered for each forward and each backward.
    Weights,
}

impl Zero {
    /// All stages.
    pub const ALL: [Zero; 4] = [Zero::Nothing, Zero::OptimizerStates, Zero::Gradients, Zero::Weights];
}

impl TryFrom<u8> for Zero {
    type Error = String;

    fn try_from(stage: u8) -> Result<Zero, String> {
        Zero::ALL.get(usize::from(stage)).copied().ok_or(format!("ZeRO stage {stage} is not one of 0, 1, 2, 3"))
    }
}

impl From<Zero> for u8 {
    fn from(zero: Zero) -> u8 {
        zero as u8
    }
}

/// Matrices of a block, of the embedding or of the head in one flat buffer, which one collective serves: all that are read in the same way.
pub(super) struct Unit {
    /// Names of the matrices, in the order of the buffer.
    names: Vec<String>,
    pub(super) slices: Slices,
    /// Whether the matrices are read as codes, and not as values.
    pub(super) codes: bool,
    /// Between and within steps: what is kept of the weights.
    pub(super) weights: Stored,
    /// Of codes: the cast of this rank's slice of each matrix, without the codes.
    pub(super) casts: Vec<Option<QuantizedTensor>>,
    /// During an update: by matrix, the part of the memory of `weights` that the update does not write.
    lent: Vec<Option<Tensor>>,
    /// During an update of which this rank does nothing: that memory.
    untouched: Option<Tensor>,
}

/// The weights or codes of a unit, as a rank keeps them.
#[derive(Default)]
pub(super) enum Stored {
    /// Nothing is divided, or a gather has the buffer.
    #[default]
    None,
    /// The buffer, of which this rank's slice holds.
    Buffer(Tensor),
    /// The buffer of gathered matrices, by matrix.
    Gathered(Vec<Tensor>),
    /// This rank's slice.
    Slice(Tensor),
}

impl Stored {
    /// The buffer or slice, whose other parts need not hold.
    pub(super) fn take(&mut self, rank: usize) -> Result<Tensor> {
        match std::mem::take(self) {
            Stored::Gathered(parts) => Ok(Tensor::join(parts)?),
            Stored::Buffer(tensor) | Stored::Slice(tensor) => Ok(tensor),
            Stored::None => Err(Error::Rank { rank, words: "weights were lost in a gather that failed".into() }),
        }
    }
}

impl Unit {
    /// For messages and the order of collectives.
    pub(super) fn name(&self) -> &str {
        &self.names[0]
    }
}

/// How the ranks of a run divide a model.
pub struct Partition {
    ranks: Rc<DataParallel>,
    zero: Zero,
    /// Of several ranks.
    units: RefCell<Vec<Unit>>,
}

impl Partition {
    /// One rank, which has all.
    pub fn solo() -> Partition {
        Partition { ranks: Rc::new(DataParallel::solo()), zero: Zero::Nothing, units: RefCell::default() }
    }

    /// Divides `model` among `ranks`, before its optimizer is made and its weights are cast. Where `values` is set, steps in high precision
    /// read the weights of FP8 products too.
    ///
    /// Errors with [`Error::Config`] for formats and placements of weights that cannot be divided.
    pub fn new(model: &mut Decoder, ranks: Rc<DataParallel>, zero: Zero, values: bool) -> Result<Partition> {
        let mut units = Vec::new();
        if ranks.size() > 1 {
            let (all, scaling) = model.units_and_scaling();
            for mut params in all {
                for codes in [false, true] {
                    let casts = scaling.casts(Mode::TRAINING);
                    let mut matrices = Vec::new();
                    for param in params.iter_mut().filter(|param| is_matrix(param)) {
                        let as_codes = zero >= Zero::OptimizerStates && !values && param.is_read_as_codes(&casts)?;
                        if as_codes == codes {
                            matrices.push(&mut **param);
                        }
                    }
                    if !matrices.is_empty() {
                        units.push(Unit::new(matrices, codes, &ranks, zero)?);
                    }
                }
            }
        }
        Ok(Partition { ranks, zero, units: RefCell::new(units) })
    }

    /// The ranks.
    pub fn ranks(&self) -> &DataParallel {
        &self.ranks
    }

    /// What they divide.
    pub fn zero(&self) -> Zero {
        self.zero
    }

    /// Whether a rank keeps less than the whole model.
    pub fn divides(&self) -> bool {
        self.zero > Zero::Nothing && self.ranks.size() > 1
    }

    /// The units.
    pub(super) fn units(&self) -> RefMut<'_, Vec<Unit>> {
        self.units.borrow_mut()
    }

    /// The global norm of the reduced gradients of `params`, F32 `[1]`, on all ranks. The sum of squares is F64, of another order than
    /// that of one rank.
    pub fn grad_norm(&self, params: &[&mut Param]) -> Result<Tensor> {
        if !self.divides() {
            return AdamWOptimizer::grad_norm(params);
        }
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        // Vectors are the same on all ranks, and counted once.
        let counted = params.iter().filter(|param| param.is_sliced() || rank == 0);
        let grads: Vec<_> = counted.filter_map(|param| param.grad.as_ref()).map(Grad::read).collect();
        let mut sums = Tensor::zeros(params[0].weights.device(), &[size], DType::F64)?;
        if !grads.is_empty() {
            sums.copy_from(rank, &sum_of_squares(&grads)?)?;
        }
        Ok(root_of_sum(&self.ranks.comm().all_gather("gradient norm", sums)?.wait()?)?)
    }

    /// Updates the weights with reduced gradients, each rank its slices, and casts them for the coming step.
    pub fn update(&self, model: &mut Decoder, optimizer: &mut AdamWOptimizer, norm: &Tensor) -> Result<()> {
        let (mut params, scaling) = model.parameters_and_scaling();
        // Scales move on first, so that new weights are cast by them.
        scaling.update()?;
        let mut casts = scaling.casts(Mode::TRAINING);
        self.lend(&mut params, &casts, true)?;
        optimizer.step(&mut params, &mut casts, norm)?;
        self.collect(&mut params, &mut casts)
    }

    /// Casts all weights with the current scales, as [`Decoder::quantize_weights`] does for a model of one rank.
    pub fn quantize_weights(&self, model: &mut Decoder) -> Result<()> {
        if !self.divides() {
            return model.quantize_weights();
        }
        let (mut params, scaling) = model.parameters_and_scaling();
        let mut casts = scaling.casts(Mode::TRAINING);
        self.lend(&mut params, &casts, false)?;
        self.collect(&mut params, &mut casts)?;
        scaling.losses().map(drop)
    }

    /// Forgets what was gathered, before a step: it was gathered from the weights before the last update.
    pub fn begin_step(&self) -> Result<()> {
        for unit in self.units().iter_mut() {
            if matches!(unit.weights, Stored::Gathered(_)) {
                unit.weights = Stored::Buffer(unit.weights.take(self.ranks.rank())?);
            }
        }
        Ok(())
    }

    /// Hands out the memory of slices, as [`Unit::lend`].
    fn lend(&self, params: &mut [&mut Param], casts: &Casts, update: bool) -> Result<()> {
        self.each_unit(params, |unit, matrices| unit.lend(matrices, casts, self.ranks.rank(), self.zero, update))
    }

    /// Runs `work` on each unit that ranks divide, with its matrices.
    fn each_unit(
        &self,
        params: &mut [&mut Param],
        mut work: impl FnMut(&mut Unit, &mut [&mut Param]) -> Result<()>,
    ) -> Result<()> {
        for unit in self.units().iter_mut().filter(|_| self.divides()) {
            let mut matrices: Vec<&mut Param> = params
                .iter_mut()
                .map(|param| &mut **param)
                .filter(|param| unit.matrix(param.name()).is_some())
                .collect();
            work(unit, &mut matrices)?;
        }
        Ok(())
    }

    /// Finds the scales of the coming casts, and takes the memory of slices back, with the weights that will be gathered.
    fn collect(&self, params: &mut [&mut Param], casts: &mut Casts) -> Result<()> {
        let mut amaxes = Vec::new();
        for (i, param) in params.iter_mut().enumerate().filter(|(_, param)| param.is_sliced()) {
            amaxes.extend(param.slice_amax(casts)?.map(|amax| (i, amax)));
        }
        if let Some((_, first)) = amaxes.first() {
            // One maximum over ranks for all parameters.
            let mut all = Tensor::empty(first.device(), &[amaxes.len()], DType::F32)?;
            for (at, (_, amax)) in amaxes.iter().enumerate() {
                all.copy_from(at, amax)?;
            }
            let all = self.ranks.comm().all_reduce("amaxes of weights", Reduce::Max, all)?.wait()?;
            for (at, (i, mut amax)) in amaxes.into_iter().enumerate() {
                amax.copy_from(0, &all.rows(at, at + 1)?)?;
                params[i].set_scale(amax, casts)?;
            }
        }
        self.each_unit(params, |unit, matrices| unit.collect(matrices, casts, self.ranks.rank(), self.zero))
    }

    /// The whole weights of `param` in the compute type. All ranks ask for the same ones in the same order.
    pub fn value(&self, param: &Param) -> Result<Tensor> {
        if !param.is_sliced() {
            return param.value();
        }
        let units = self.units();
        let place = |unit: &Unit| unit.names.iter().position(|name| name == param.name());
        let (unit, at) =
            units.iter().find_map(|unit| Some((unit, place(unit)?))).expect("a sliced parameter is in a unit");
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        let owned: Vec<_> = (0..size).map(|rank| unit.slices.owned(rank).swap_remove(at)).collect();
        let longest = owned.iter().map(Range::len).max().unwrap_or(0);
        let mut slices = Tensor::zeros(param.weights.device(), &[size * longest], param.dtype())?;
        let own = param.value()?;
        slices.copy_from(rank * longest, &own.reshape(&[own.len()])?)?;
        let slices = self.ranks.comm().all_gather(param.name(), slices)?.wait()?;
        let mut whole = Tensor::empty(slices.device(), &[param.weights.shape().iter().product()], param.dtype())?;
        for (rank, owned) in owned.into_iter().enumerate().filter(|(_, owned)| !owned.is_empty()) {
            whole.copy_from(owned.start, &slices.rows(rank * longest, rank * longest + owned.len())?)?;
        }
        whole.reshape(param.weights.shape()).map_err(Error::from)
    }

    /// Makes the model whole on every rank, for inference: it can no longer be trained.
    pub fn gather(&self, model: &mut Decoder) -> Result<()> {
        for param in model.parameters().into_iter().filter(|param| param.is_sliced()) {
            let whole = self.value(param)?;
            param.end_training(whole);
        }
        Ok(())
    }
}

impl Unit {
    /// A unit of `matrices`, of which each rank keeps a slice if `zero` says so.
    fn new(matrices: Vec<&mut Param>, codes: bool, ranks: &DataParallel, zero: Zero) -> Result<Unit> {
        if zero > Zero::Nothing && matrices.iter().any(|param| param.is_offloaded()) {
            return Err(Error::Config(
                "`memory.offload_parameters` keeps weights in the host's memory, from where ranks do not gather them; set it to 0, or `parallel.zero` to 0".into(),
            ));
        }
        let slices = Slices::new(matrices.iter().map(|param| param.weights.shape().iter().product()), ranks.size());
        let names = matrices.iter().map(|param| param.name().to_string()).collect();
        if zero > Zero::Nothing {
            for (param, owned) in matrices.into_iter().zip(slices.owned(ranks.rank())) {
                param.keep_slice(owned, codes)?;
            }
        }
        let casts = slices.matrices().iter().map(|_| None).collect();
        Ok(Unit { names, slices, codes, weights: Stored::None, casts, lent: Vec::new(), untouched: None })
    }

    /// The number of the matrix called so.
    pub(super) fn matrix(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|other| other == name)
    }

    /// The matrices among `params`, in the order of the unit; `None` if they are of other units.
    pub(super) fn among<'a, 'p>(&self, params: &'a mut [&'p mut Param]) -> Option<Vec<&'a mut &'p mut Param>> {
        let found: Vec<_> = params.iter_mut().filter(|param| self.matrix(param.name()).is_some()).collect();
        (!found.is_empty()).then_some(found)
    }

    /// Hands out the memory of this rank's slices, one part per matrix that it has a part of. With `update`, an update writes there what it
    /// can; [`Unit::collect`] takes it back.
    fn lend(
        &mut self,
        matrices: &mut [&mut Param],
        casts: &Casts,
        rank: usize,
        zero: Zero,
        update: bool,
    ) -> Result<()> {
        let dtype = if self.codes { matrices[0].code_format(casts) } else { matrices[0].dtype() };
        let device = matrices[0].weights.device();
        let _scope = device.scope(if self.codes { "FP8 codes of weights" } else { "weights" });
        let (alone, slice) = (zero == Zero::Weights, self.slices.slice_len());
        let memory = match &self.weights {
            Stored::None => Tensor::empty(device, &[if alone { slice } else { self.slices.padded_len() }], dtype)?,
            _ => self.weights.take(rank)?,
        };
        let first = if alone { rank * slice } else { 0 };
        let owned = self.slices.owned(rank);
        let places: Vec<_> = (self.slices.matrices().iter().zip(&owned))
            .filter(|(_, owned)| !owned.is_empty())
            .map(|(matrix, owned)| matrix.start + owned.start - first..matrix.start + owned.end - first)
            .collect();
        if places.is_empty() {
            self.untouched = Some(memory);
            self.lent = owned.iter().map(|_| None).collect();
            return Ok(());
        }
        let mut parts = memory.split(&places)?.into_iter();
        self.lent = owned.iter().map(|owned| if owned.is_empty() { None } else { parts.next() }).collect();
        for (at, param) in matrices.iter_mut().enumerate().filter(|_| update) {
            let Some(part) = self.lent[at].take() else { continue };
            self.lent[at] = match (self.codes, self.casts[at].take()) {
                (false, _) => param.lend_value(part)?.map(flat).transpose()?,
                (true, None) => Some(part),
                (true, Some(mut into)) => {
                    into.codes = Some(reshaped(part, &[into.rows, into.columns])?);
                    match param.lend_codes(into, casts)? {
                        None => None,
                        Some(mut into) => {
                            let part = into.codes.take().map(flat).transpose()?;
                            self.casts[at] = Some(into);
                            part
                        }
                    }
                }
            };
        }
        Ok(())
    }

    /// Ends [`Unit::lend`]: this rank's slices are where they will be gathered.
    fn collect(&mut self, matrices: &mut [&mut Param], casts: &mut Casts, rank: usize, zero: Zero) -> Result<()> {
        let owned = self.slices.owned(rank);
        let mut parts: Vec<Tensor> = self.untouched.take().into_iter().collect();
        for (at, param) in matrices.iter_mut().enumerate() {
            let part = self.lent[at].take();
            let has_slice = !owned[at].is_empty();
            parts.extend(match (self.codes, part) {
                (true, part) => match param.take_codes() {
                    Some(mut made) => {
                        let codes = made.codes.take().map(flat).transpose()?;
                        self.casts[at] = Some(made);
                        codes
                    }
                    None => self.cast(at, param, part, casts)?,
                },
                (false, None) if has_slice => param.weights.take_value().map(flat).transpose()?,
                (false, None) => None,
                (false, Some(mut part)) => {
                    let value = param.value()?;
                    part.copy_from(0, &value.reshape(&[value.len()])?)?;
                    Some(part)
                }
            });
        }
        let memory = Tensor::join(parts)?;
        self.weights = if zero == Zero::Weights { Stored::Slice(memory) } else { Stored::Buffer(memory) };
        Ok(())
    }

    /// Casts the slice of matrix number `at` into `part`, if there is one.
    fn cast(&mut self, at: usize, param: &Param, part: Option<Tensor>, casts: &mut Casts) -> Result<Option<Tensor>> {
        let mut into = self.casts[at].take();
        let Some(mut part) = part else {
            self.casts[at] = Some(param.quantize_slice(into, casts)?);
            return Ok(None);
        };
        let part = match &mut into {
            None => {
                let mut made = param.quantize_slice(None, casts)?;
                let codes = made.codes.take().map(flat).transpose()?.expect("rows were asked for");
                part.copy_from(0, &codes)?;
                self.casts[at] = Some(made);
                part
            }
            Some(earlier) => {
                earlier.codes = Some(reshaped(part, &[earlier.rows, earlier.columns])?);
                let mut made = param.quantize_slice(into, casts)?;
                let codes = made.codes.take().expect("lent above");
                self.casts[at] = Some(made);
                flat(codes)?
            }
        };
        Ok(Some(part))
    }
}

/// An unshared tensor in another shape.
fn reshaped(tensor: Tensor, shape: &[usize]) -> Result<Tensor> {
    // The argument is dropped, so the result is unshared too.
    Ok(tensor.reshape(shape)?)
}

fn flat(tensor: Tensor) -> Result<Tensor> {
    let elements = tensor.len();
    reshaped(tensor, &[elements])
}

pub(super) fn is_matrix(param: &Param) -> bool {
    param.weights.shape().len() > 1
}
