//! Buckets: matrices that are gathered and reduced in one collective, and this rank's slices of their weights.
//!
//! With weights in host memory (`Placement::GatheredFromHost`), `Bucket::gather_slices` copies the weights into this rank's part of the buffer that
//! is gathered (`HostTransfer::upload_into`). The gather waits for the copy, and compute waits only for the gather. There are two cases:
//!
//! - Ranks gather values: the slices are the weights of the `Param`s, which the update fetches and writes back.
//! - Ranks gather codes: the bucket has a slice of codes in host memory. `Bucket::begin_write` copies this slice to the device for a part of the
//!   model, since an update may write nothing, and `Bucket::finish_write` stores the slice (`HostTransfer::offload`) while the next part is
//!   updated.

use crate::Ranks;
use crate::reduction::ReduceFormat;
use crate::slices::Slices;
use crate::zero::Zero;
use ottava_common::error::{Error, Result};
use ottava_recipe::param::scopes::{CODES, GRADIENTS, WEIGHTS};
use ottava_recipe::param::{Param, ParamId, Placement, UnitId};
use ottava_recipe::scaling::Casts;
use ottava_tensor::comm::{Group, Pending};
use ottava_tensor::ops::gradient_code_bytes;
use ottava_tensor::{DType, HostTransfer, MemoryKind, QuantizedTensor, Tensor};

/// Matrices of a block, of the embedding or of the head that are read in the same way, in one flat buffer for one collective.
pub(super) struct Bucket {
    /// The unit of the model.
    pub(super) unit: UnitId,
    /// Whether the matrices are of experts that ranks divide.
    experts: bool,
    /// The name of the first matrix, for error messages and the order of collectives.
    name: String,
    /// The matrices, in the order of the buffer.
    matrices: Vec<ParamId>,
    pub(super) slices: Slices,
    /// Whether products read the matrices as codes rather than values.
    codes: bool,
    /// Whether weights and codes are in host memory between passes.
    offloaded: bool,
    /// Whether this rank stores only its slice between passes, and each pass gathers the matrices; otherwise the buffer is kept.
    pub(super) stores_slice: bool,
    /// The slots of their casts.
    slots: Vec<usize>,
    /// Bytes of a gathered element, and the type of gradients.
    element: usize,
    gradients: DType,
    /// The stored part of the weights, between and within steps.
    pub(super) weights: Stored,
    /// If codes are gathered: the cast of this rank's slice of each matrix, without the codes.
    pub(super) casts: Vec<Option<QuantizedTensor>>,
    /// The errors of casts of gradients, BF16, if they are added to the gradients of the next step.
    pub(super) feedback: Option<Tensor>,
    /// During an update: by matrix, the part of the memory of `weights` that the optimizer does not write.
    unwritten: Vec<Option<Tensor>>,
    /// During an update in which this rank has no elements of the bucket: the memory of `weights`.
    untouched: Option<Tensor>,
}

/// The weights or codes of a bucket that a rank stores.
#[derive(Default)]
pub(super) enum Stored {
    /// None: nothing is divided, or a gather owns the buffer.
    #[default]
    None,
    /// The whole buffer. Only this rank's slice of it is valid.
    Buffer(Tensor),
    /// The buffer of gathered matrices, by matrix.
    Gathered(Vec<Tensor>),
    /// This rank's slice, on the device or in host memory.
    Slice(Tensor),
}

/// A gather in progress.
pub(super) struct Gather {
    pending: Pending,
    /// The copy of this rank's slice, which precedes the gather.
    upload: HostTransfer,
}

impl Gather {
    /// A gather of a buffer that has this rank's slice.
    pub(super) fn of_buffer(pending: Pending) -> Gather {
        Gather { pending, upload: HostTransfer::default() }
    }

    /// Waits for the gathered buffer.
    pub(super) fn wait(self) -> Result<Tensor> {
        let buffer = self.pending.wait()?;
        self.upload.wait()?;
        Ok(buffer)
    }
}

/// What writes to the memory of a unit in [`Bucket::begin_write`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Writer {
    /// Only the casts and copies of [`Unit::collect`].
    Cast,
    /// An update, which writes weights.
    Update,
    /// An update that also casts the weights that it writes.
    CastingUpdate,
}

impl Stored {
    /// Takes the buffer or slice; other parts of the buffer may be invalid.
    pub(super) fn take(&mut self, rank: usize) -> Result<Tensor> {
        match std::mem::take(self) {
            Stored::Gathered(parts) => Ok(Tensor::join(parts)?),
            Stored::Buffer(tensor) | Stored::Slice(tensor) => Ok(tensor),
            Stored::None => Err(Error::Rank { rank, words: "weights were lost in a gather that failed".into() }),
        }
    }
}

impl Bucket {
    /// The ranks that sum the gradients of the matrices and divide them.
    pub(super) fn group<'a>(&self, ranks: &'a Ranks) -> &'a Group {
        ranks.replicas_of(self.experts)
    }

    /// The name, for error messages and the order of collectives.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// A bucket of `matrices` of a `unit`; with a `zero` stage of 1 or more, each rank stores a slice.
    pub(super) fn new(
        unit: UnitId,
        mut matrices: Vec<&mut Param>,
        codes: bool,
        ranks: &Ranks,
        zero: Zero,
        reduction: ReduceFormat,
    ) -> Result<Bucket> {
        let divides = zero > Zero::Nothing;
        let offloaded = divides && matrices.iter().any(|param| param.placement() == Placement::Host);
        let (ranks, experts) = (ranks.replicas(matrices[0]), matrices[0].is_of_experts());
        let slices = Slices::new(matrices.iter().map(|param| param.weights.shape().iter().product()), ranks.size());
        let (name, ids) = (matrices[0].name().to_string(), matrices.iter().map(|param| param.id()).collect());
        let slots = matrices.iter().filter_map(|param| param.cast_slot()).collect();
        matrices.iter_mut().for_each(|param| param.gradient.keep_sums());
        let device = matrices[0].weights.device().clone();
        let element = if codes { DType::E4M3 } else { matrices[0].dtype() }.size();
        let gradients = matrices[0].gradient.dtype().expect("ranks keep sums");
        let feedback = match reduction {
            ReduceFormat::Float8 { feedback: true } => {
                let _scope = device.scope(GRADIENTS);
                Some(Tensor::zeros(&device, &[slices.padded_len()], DType::BF16)?)
            }
            _ => None,
        };
        if divides {
            for (param, owned) in matrices.into_iter().zip(slices.owned(ranks.rank())) {
                param.keep_slice(owned, codes, offloaded)?;
            }
        }
        let casts = slices.matrices().iter().map(|_| None).collect();
        Ok(Bucket {
            unit,
            experts,
            name,
            matrices: ids,
            slices,
            codes,
            offloaded,
            stores_slice: offloaded || zero == Zero::Weights,
            slots,
            element,
            gradients,
            weights: Stored::None,
            casts,
            feedback,
            unwritten: Vec::new(),
            untouched: None,
        })
    }

    /// Bytes of the buffer that ranks gather.
    pub(super) fn gathered_bytes(&self) -> usize {
        self.slices.padded_len() * self.element
    }

    /// Whether the buffer has FP8 codes.
    pub(super) fn gathers_codes(&self) -> bool {
        self.codes
    }

    /// Whether each rank casts its slice of the matrix whose cast has this `slot`.
    pub(super) fn casts_slices_in(&self, slot: usize) -> bool {
        self.codes && self.slots.contains(&slot)
    }

    /// Bytes of the buffer of gradients that ranks sum, sent as `reduction`.
    pub(super) fn reduced_bytes(&self, reduction: ReduceFormat, ranks: usize) -> usize {
        match reduction {
            ReduceFormat::Stored => self.slices.padded_len() * self.gradients.size(),
            ReduceFormat::Float8 { .. } => ranks * gradient_code_bytes(self.slices.slice_len()),
        }
    }

    /// The number of a matrix in the bucket.
    pub(super) fn number_of(&self, param: &Param) -> Option<usize> {
        self.matrices.iter().position(|id| *id == param.id())
    }

    /// The parameters of `params` that are in this bucket, in its order; `None` if there are none.
    pub(super) fn among<'a, 'p>(&self, params: &'a mut [&'p mut Param]) -> Option<Vec<&'a mut &'p mut Param>> {
        let found: Vec<_> = params.iter_mut().filter(|param| self.number_of(param).is_some()).collect();
        (!found.is_empty()).then_some(found)
    }

    /// Whether ranks gather the values that parameters store in host memory, so that there is nothing to write for the gather.
    fn reads_params(&self) -> bool {
        self.offloaded && !self.codes
    }

    /// Whether codes are written on the device and then copied to host memory.
    pub(super) fn offloads_codes(&self) -> bool {
        self.offloaded && self.codes
    }

    /// Starts to gather the matrices, which are among `params`, from the slices of all ranks. `None` if there is no slice yet.
    pub(super) fn gather_slices(&self, params: &[&Param], group: &Group) -> Result<Option<Gather>> {
        let (rank, length) = (group.rank(), self.slices.padded_len());
        let sources = match &self.weights {
            Stored::Slice(slice) => vec![(slice, rank * self.slices.slice_len())],
            _ if self.reads_params() => {
                let owned = self.slices.owned(rank);
                let start = |at: usize| self.slices.matrices()[at].start + owned[at].start;
                let numbers = params.iter().map(|param| (param, self.number_of(param)));
                numbers.filter_map(|(param, at)| Some((param.weights.read_from(), start(at?)))).collect()
            }
            _ => return Ok(None),
        };
        let Some((first, _)) = sources.first() else { return Ok(None) };
        let mut buffer = group.symmetric(first.device(), &[length], first.dtype())?;
        let upload = HostTransfer::upload_into(&mut buffer, &sources)?;
        upload.before_collectives()?;
        Ok(Some(Gather { pending: group.all_gather(&self.name, buffer)?, upload }))
    }

    /// Splits the memory of this rank's slice by matrix, so that an update writes to it directly where possible; [`Bucket::finish_write`]
    /// writes the rest and joins the memory.
    pub(super) fn begin_write(
        &mut self,
        matrices: &mut [&mut Param],
        casts: &Casts,
        group: &Group,
        writer: Writer,
    ) -> Result<()> {
        if self.reads_params() {
            return Ok(());
        }
        let rank = group.rank();
        let dtype = if self.codes { matrices[0].code_format(casts) } else { matrices[0].dtype() };
        let device = matrices[0].weights.device();
        let _scope = device.scope(if self.codes { CODES } else { WEIGHTS });
        let slice = self.slices.slice_len();
        let memory = match &self.weights {
            Stored::None if !self.stores_slice => group.symmetric(device, &[self.slices.padded_len()], dtype)?,
            Stored::None => Tensor::empty(device, &[slice], dtype)?,
            // An update whose norm is not finite writes nothing, so what is in host memory is needed.
            Stored::Slice(slice) if slice.memory_kind() == MemoryKind::Host => {
                let (mut copies, transfer) = HostTransfer::upload(&[slice])?;
                transfer.wait()?;
                copies.pop().expect("a copy of each tensor")
            }
            _ => self.weights.take(rank)?,
        };
        let first = if self.stores_slice { rank * slice } else { 0 };
        let owned = self.slices.owned(rank);
        let places: Vec<_> = (self.slices.matrices().iter().zip(&owned))
            .filter(|(_, owned)| !owned.is_empty())
            .map(|(matrix, owned)| matrix.start + owned.start - first..matrix.start + owned.end - first)
            .collect();
        if places.is_empty() {
            self.untouched = Some(memory);
            self.unwritten = owned.iter().map(|_| None).collect();
            return Ok(());
        }
        let mut parts = memory.split(&places)?.into_iter();
        self.unwritten = owned.iter().map(|owned| if owned.is_empty() { None } else { parts.next() }).collect();
        for (at, param) in matrices.iter_mut().enumerate().filter(|_| writer != Writer::Cast) {
            let Some(part) = self.unwritten[at].take() else { continue };
            self.unwritten[at] = match (self.codes, self.casts[at].take()) {
                (false, _) => param.write_value_to(part)?.map(flat).transpose()?,
                (true, Some(mut into)) if writer == Writer::CastingUpdate && param.is_cast_by_update(casts)? => {
                    into.codes = Some(reshaped(part, &[into.rows, into.columns])?);
                    param.write_codes_to(into);
                    None
                }
                (true, earlier) => {
                    self.casts[at] = earlier;
                    Some(part)
                }
            };
        }
        Ok(())
    }

    /// Ends [`Bucket::begin_write`]; this rank's slice is then complete where it is gathered from, once the returned transfer has ended.
    pub(super) fn finish_write(
        &mut self,
        matrices: &mut [&mut Param],
        casts: &mut Casts,
        rank: usize,
    ) -> Result<HostTransfer> {
        if self.reads_params() {
            return Ok(HostTransfer::default());
        }
        let owned = self.slices.owned(rank);
        let mut parts: Vec<Tensor> = self.untouched.take().into_iter().collect();
        for (at, param) in matrices.iter_mut().enumerate() {
            let part = self.unwritten[at].take();
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
        if !self.offloaded {
            self.weights = if self.stores_slice { Stored::Slice(memory) } else { Stored::Buffer(memory) };
            return Ok(HostTransfer::default());
        }
        let earlier = match std::mem::take(&mut self.weights) {
            Stored::Slice(earlier) => Some(earlier),
            _ => None,
        };
        let (slice, transfer) = HostTransfer::offload(memory, earlier)?;
        self.weights = Stored::Slice(slice);
        Ok(transfer)
    }

    /// Casts the slice of matrix number `at` into `part`, if there is one.
    fn cast(
        &mut self,
        at: usize,
        param: &mut Param,
        part: Option<Tensor>,
        casts: &mut Casts,
    ) -> Result<Option<Tensor>> {
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
                let codes = made.codes.take().expect("set above");
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

/// An unshared tensor as a vector.
pub(super) fn flat(tensor: Tensor) -> Result<Tensor> {
    let elements = tensor.len();
    reshaped(tensor, &[elements])
}
