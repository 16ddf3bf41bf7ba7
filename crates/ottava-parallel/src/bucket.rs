//! Buckets: matrices that are gathered and reduced in one collective, and this rank's slices of these matrices.
//!
//! With weights in host memory (`memory.offload_parameters`), `Bucket::gather_slices` copies the weights into this rank's part of the buffer that
//! is gathered (`HostTransfer::upload_into`). The gather waits for the copy, and compute waits only for the gather. There are two cases:
//!
//! - Ranks gather values. The slices are the weights of the `Param`s, which the update fetches and writes back.
//! - Ranks gather codes. The bucket has a slice of codes in host memory. `Bucket::begin_write` copies the slices of a part of the model to the
//!   device, since an update may write nothing. `Bucket::finish_write` stores a slice (`HostTransfer::offload`) while the next part is updated.
//!
//! `Bucket::begin_write` divides the memory of the slice among the `Param`s, and an update writes to the memory of a `Param` if it can. The rest of
//! the memory is in the `BucketWrite` that `Bucket::begin_write` returns. `Bucket::finish_write` consumes it and joins the memory.

use crate::Ranks;
use crate::reduction::ReduceFormat;
use crate::slices::Slices;
use crate::zero::Zero;
use ottava_common::error::{Error, Result};
use ottava_recipe::param::scopes::{CODES, GRADIENTS, WEIGHTS};
use ottava_recipe::param::{Param, ParamId, SliceWrite, UnitId, WeightCast, Writer};
use ottava_recipe::scaling::Casts;
use ottava_tensor::comm::{Group, Pending};
use ottava_tensor::ops::gradient_code_bytes;
use ottava_tensor::{DType, HostTransfer, MemoryKind, QuantizedTensor, Tensor};
use std::collections::HashMap;

/// Matrices of a block, of the embedding or of the head that are read in the same way, in one flat buffer for one collective.
pub(super) struct Bucket {
    /// The unit of the model.
    pub(super) unit: UnitId,
    /// Whether the matrices belong to experts that ranks divide.
    experts: bool,
    /// The name of the first matrix, for error messages and the order of collectives.
    name: String,
    /// The matrices, in the order of the buffer.
    pub(super) matrices: Vec<Matrix>,
    pub(super) slices: Slices,
    /// Whether products read the matrices as codes rather than values.
    codes: bool,
    /// The data that this rank stores between passes.
    kept: Kept,
    /// The bytes of a gathered element, and the type of gradients.
    element: usize,
    gradients: DType,
    /// The stored part of the weights, between steps and within a step.
    pub(super) weights: Stored,
    /// The cast errors of gradients, BF16, if they are added to the gradients of the next step.
    pub(super) feedback: Option<Tensor>,
}

/// A matrix of a bucket.
pub(super) struct Matrix {
    id: ParamId,
    /// The slot of the matrix's cast.
    slot: Option<usize>,
    /// The cast of this rank's slice without the codes, if codes are gathered.
    pub(super) cast: Option<QuantizedTensor>,
}

/// The part of a bucket's matrices that a rank stores between passes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// The buffer of the last gather.
    Buffer,
    /// The rank's slice. Each pass gathers the matrices.
    Slice,
    /// The rank's slice, in host memory: the weights of the `Param`s, or codes. Each pass gathers the matrices.
    SliceInHostMemory,
}

/// The slice of a bucket while it is written, from [`Bucket::begin_write`] to [`Bucket::finish_write`].
#[must_use = "the slice is written by `Bucket::finish_write`"]
pub(super) struct BucketWrite {
    /// The writes of the matrices' slices.
    matrices: Vec<SliceWrite>,
    /// The memory of this rank's slice, if this rank has no elements of the bucket.
    untouched: Option<Tensor>,
}

/// The weights or codes of a bucket that a rank stores.
#[derive(Default)]
pub(super) enum Stored {
    /// Nothing is stored, because nothing is divided, or because a gather owns the buffer.
    #[default]
    None,
    /// The whole buffer. Only this rank's slice of the buffer is valid.
    Buffer(Tensor),
    /// The buffer of gathered matrices, divided by matrix.
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
    /// Creates a gather of a buffer that already has this rank's slice.
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

impl Stored {
    /// Takes the buffer or slice. Other parts of the buffer may be invalid.
    pub(super) fn take(&mut self, rank: usize) -> Result<Tensor> {
        match std::mem::take(self) {
            Stored::Gathered(parts) => Ok(Tensor::join(parts)?),
            Stored::Buffer(tensor) | Stored::Slice(tensor) => Ok(tensor),
            Stored::None => Err(Error::Rank { rank, words: "weights were lost in a gather that failed".into() }),
        }
    }
}

impl Bucket {
    /// Returns the ranks that divide the matrices, and to which gradients of the matrices are scattered.
    pub(super) fn group<'a>(&self, ranks: &'a Ranks) -> &'a Group {
        ranks.shard_group(self.experts)
    }

    /// Returns the name, for error messages and the order of collectives.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Creates a bucket of the matrices `params` of a `unit`. With a `zero` stage of 1 or more, each rank stores a slice.
    pub(super) fn new(
        unit: UnitId,
        mut params: Vec<&mut Param>,
        codes: bool,
        ranks: &Ranks,
        zero: Zero,
        reduction: ReduceFormat,
    ) -> Result<Bucket> {
        let divides = zero > Zero::Nothing;
        let kept = match zero {
            _ if divides && params.iter().any(|param| param.is_offloaded()) => Kept::SliceInHostMemory,
            Zero::Weights => Kept::Slice,
            _ => Kept::Buffer,
        };
        let experts = params[0].identity.is_of_experts();
        let ranks = ranks.shard_group(experts);
        let slices = Slices::new(params.iter().map(|param| param.weights.shape().iter().product()), ranks.size());
        let name = params[0].identity.name().to_string();
        let of_bucket =
            |param: &&mut Param| Matrix { id: param.identity.id, slot: param.cast().map(WeightCast::slot), cast: None };
        let matrices = params.iter().map(of_bucket).collect();
        params.iter_mut().for_each(|param| param.gradient.keep_sums());
        let device = params[0].weights.device().clone();
        let element = if codes { DType::E4M3 } else { params[0].weights.dtype() }.size();
        let gradients = params[0].gradient.dtype().expect("ranks keep sums");
        let feedback = match reduction {
            ReduceFormat::Float8 { feedback: true } => {
                let _scope = device.scope(GRADIENTS);
                Some(Tensor::zeros(&device, &[slices.padded_len()], DType::BF16)?)
            }
            _ => None,
        };
        if divides {
            for (param, owned) in params.into_iter().zip(slices.owned(ranks.rank())) {
                param.keep_slice(owned, codes, kept == Kept::SliceInHostMemory)?;
            }
        }
        let weights = Stored::None;
        Ok(Bucket { unit, experts, name, matrices, slices, codes, kept, element, gradients, weights, feedback })
    }

    /// Returns whether this rank stores only its slice between passes, and each pass gathers the matrices. Otherwise the buffer is kept.
    pub(super) fn stores_slice(&self) -> bool {
        self.kept != Kept::Buffer
    }

    /// Returns the number of bytes in the buffer that ranks gather.
    pub(super) fn gathered_bytes(&self) -> usize {
        self.slices.padded_len() * self.element
    }

    /// Returns whether the buffer has FP8 codes.
    pub(super) fn gathers_codes(&self) -> bool {
        self.codes
    }

    /// Returns whether each rank casts its slice of the matrix whose cast has this `slot`.
    pub(super) fn casts_slices_in(&self, slot: usize) -> bool {
        self.codes && self.matrices.iter().any(|matrix| matrix.slot == Some(slot))
    }

    /// Returns the number of bytes in the buffer of gradients that ranks sum, if they are sent as `reduction`.
    pub(super) fn reduced_bytes(&self, reduction: ReduceFormat, ranks: usize) -> usize {
        match reduction {
            ReduceFormat::Stored => self.slices.padded_len() * self.gradients.size(),
            ReduceFormat::Float8 { .. } => ranks * gradient_code_bytes(self.slices.slice_len()),
        }
    }

    /// Returns the number of bytes of a rank's slice of the gradients, in the type in which backward accumulates them.
    pub(super) fn gradient_slice_bytes(&self) -> usize {
        self.slices.slice_len() * self.gradients.size()
    }

    /// Returns the index of a matrix in the bucket.
    pub(super) fn number_of(&self, param: &Param) -> Option<usize> {
        self.matrices.iter().position(|matrix| matrix.id == param.identity.id)
    }

    /// Returns the entries of `params` that are in this bucket, in the order of the bucket, or `None` if no entry is.
    pub(super) fn among<'a, 'p>(&self, params: &'a mut [&'p mut Param]) -> Option<Vec<&'a mut &'p mut Param>> {
        let found: Vec<_> = params.iter_mut().filter(|param| self.number_of(param).is_some()).collect();
        (!found.is_empty()).then_some(found)
    }

    /// Returns whether ranks gather the values that parameters store in host memory. Then nothing is written for the gather.
    fn reads_params(&self) -> bool {
        self.kept == Kept::SliceInHostMemory && !self.codes
    }

    /// Returns whether codes are written on the device and then copied to host memory.
    pub(super) fn offloads_codes(&self) -> bool {
        self.kept == Kept::SliceInHostMemory && self.codes
    }

    /// Starts to gather the matrices, which are among `params`, from the slices of all ranks. Returns `None` if the slice does not exist yet.
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

    /// Splits the memory of this rank's slice by matrix, so that an update can write to it directly. [`Bucket::finish_write`] writes the rest and
    /// joins the memory. Returns `None` if nothing is written for the gather.
    pub(super) fn begin_write(
        &mut self,
        matrices: Vec<&mut &mut Param>,
        casts: &Casts,
        group: &Group,
        writer: Writer,
    ) -> Result<Option<BucketWrite>> {
        if self.reads_params() {
            return Ok(None);
        }
        let (rank, slice, stores_slice) = (group.rank(), self.slices.slice_len(), self.stores_slice());
        let dtype = match self.codes {
            true => matrices[0].cast().expect("a matrix that is read as codes has a cast").format(casts),
            false => matrices[0].weights.dtype(),
        };
        let device = matrices[0].weights.device().clone();
        let _scope = device.scope(if self.codes { CODES } else { WEIGHTS });
        let memory = match &self.weights {
            Stored::None if !stores_slice => group.symmetric(&device, &[self.slices.padded_len()], dtype)?,
            Stored::None => Tensor::empty(&device, &[slice], dtype)?,
            // An update whose norm is not finite writes nothing, so the codes in host memory are needed.
            Stored::Slice(slice) if slice.memory_kind() == MemoryKind::Host => {
                let (mut copies, transfer) = HostTransfer::upload(&[slice])?;
                transfer.wait()?;
                copies.pop().expect("a copy of each tensor")
            }
            _ => self.weights.take(rank)?,
        };
        let first = if stores_slice { rank * slice } else { 0 };
        let owned = self.slices.owned(rank);
        let places: Vec<_> = (self.slices.matrices().iter().zip(&owned))
            .filter(|(_, owned)| !owned.is_empty())
            .map(|(matrix, owned)| matrix.start + owned.start - first..matrix.start + owned.end - first)
            .collect();
        let (parts, untouched) = match places.is_empty() {
            true => (Vec::new(), Some(memory)),
            false => (memory.split(&places)?, None),
        };
        let mut parts = parts.into_iter();
        let mut write = BucketWrite { matrices: Vec::new(), untouched };
        for ((param, matrix), owned) in matrices.into_iter().zip(&mut self.matrices).zip(&owned) {
            let part = if owned.is_empty() { None } else { parts.next() };
            write.matrices.push(param.begin_write(part, matrix.cast.take(), writer, casts)?);
        }
        Ok(Some(write))
    }

    /// Ends a `write`. This rank's slice is complete, in the memory from which it is gathered, once the returned transfer has ended. `block_amaxes`
    /// has the results of [`Param::set_scales`], by parameter.
    pub(super) fn finish_write(
        &mut self,
        write: BucketWrite,
        matrices: Vec<&mut &mut Param>,
        block_amaxes: &mut HashMap<ParamId, Tensor>,
        casts: &mut Casts,
    ) -> Result<HostTransfer> {
        let mut parts: Vec<Tensor> = write.untouched.into_iter().collect();
        for ((param, matrix), slice) in matrices.into_iter().zip(&mut self.matrices).zip(write.matrices) {
            let (part, cast) = param.finish_write(slice, block_amaxes.remove(&matrix.id), casts)?;
            parts.extend(part);
            matrix.cast = cast;
        }
        let memory = Tensor::join(parts)?;
        let earlier = match (self.kept, std::mem::take(&mut self.weights)) {
            (Kept::Buffer, _) => {
                self.weights = Stored::Buffer(memory);
                return Ok(HostTransfer::default());
            }
            (Kept::Slice, _) => {
                self.weights = Stored::Slice(memory);
                return Ok(HostTransfer::default());
            }
            (Kept::SliceInHostMemory, Stored::Slice(earlier)) => Some(earlier),
            (Kept::SliceInHostMemory, _) => None,
        };
        let (slice, transfer) = HostTransfer::offload(memory, earlier)?;
        self.weights = Stored::Slice(slice);
        Ok(transfer)
    }
}
