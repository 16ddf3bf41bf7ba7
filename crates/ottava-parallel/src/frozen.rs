//! Frozen weights in ZeRO stage 3. Between passes, each rank stores a slice of the frozen weights of a unit, in the form that products read.
//!
//! A weight is loaded and cast whole, so its codes are the same as on one rank. Then each rank keeps its slice of the bytes, and all scales.

use crate::Ranks;
use crate::slices::Slices;
use ottava_common::error::Result;
use ottava_recipe::param::scopes::{CODES, FROZEN_CODES, FROZEN_WEIGHTS};
use ottava_recipe::param::{Loan, LoanedWeight, Param, ParamId, UnitId};
use ottava_tensor::comm::{Group, Pending};
use ottava_tensor::{DType, QuantizedTensor, Tensor};

/// Frozen weights of a unit, in one flat buffer for one collective. This rank stores a slice of the buffer.
pub(super) struct FrozenBucket {
    pub(super) unit: UnitId,
    kind: Kind,
    /// The name of the first weight, for error messages and the order of collectives.
    name: String,
    weights: Vec<(ParamId, Form)>,
    slices: Slices,
    slice: Tensor,
}

/// The properties that all weights of a bucket share.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// Whether the weights belong to experts that ranks divide.
    experts: bool,
    scope: &'static str,
    dtype: DType,
}

/// The form of a weight, without its elements.
enum Form {
    /// A value of this shape.
    Value(Vec<usize>),
    /// The scales, and the shapes of the codes and of their transpose.
    Codes(Box<QuantizedTensor>, [Option<Vec<usize>>; 2]),
}

impl Form {
    /// Returns the form of a `weight`, the scope of its memory, and its elements.
    fn of(weight: LoanedWeight) -> (Form, &'static str, Vec<Tensor>) {
        match weight {
            LoanedWeight::Value(value) | LoanedWeight::Stored(value) => {
                (Form::Value(value.shape().to_vec()), FROZEN_WEIGHTS, vec![value])
            }
            LoanedWeight::Codes(mut codes) => {
                let scope = if codes.transposed.is_some() { CODES } else { FROZEN_CODES };
                let tensors = [codes.codes.take(), codes.transposed.take()];
                let shapes = tensors.each_ref().map(|codes| codes.as_ref().map(|codes| codes.shape().to_vec()));
                (Form::Codes(Box::new(codes), shapes), scope, tensors.into_iter().flatten().collect())
            }
        }
    }

    /// Returns the weight whose elements are the next entries of `parts`.
    fn join(&self, parts: &mut impl Iterator<Item = Tensor>) -> Result<LoanedWeight> {
        let mut next = |shape: &Vec<usize>| parts.next().expect("a bucket has all elements").reshape(shape);
        Ok(match self {
            Form::Value(shape) => LoanedWeight::Value(next(shape)?),
            Form::Codes(scales, [codes, transposed]) => {
                let codes = codes.as_ref().map(&mut next).transpose()?;
                let transposed = transposed.as_ref().map(&mut next).transpose()?;
                LoanedWeight::Codes(QuantizedTensor { codes, transposed, ..(**scales).clone() })
            }
        })
    }
}

/// Frozen weights of one kind that will be divided.
struct Whole {
    kind: Kind,
    name: String,
    weights: Vec<(ParamId, Form)>,
    tensors: Vec<Tensor>,
}

/// Divides the frozen matrices of a `unit` among the ranks that have the same matrices. The matrices must have been loaded and cast.
pub(super) fn divide_frozen(unit: &mut [&mut Param], ranks: &Ranks) -> Result<Vec<FrozenBucket>> {
    let mut all: Vec<Whole> = Vec::new();
    for param in unit.iter_mut().filter(|param| !param.is_trained() && param.identity.is_matrix()) {
        if ranks.shard_group(param.identity.is_of_experts()).size() == 1 {
            continue;
        }
        for weight in param.take_frozen() {
            let (form, scope, tensors) = Form::of(weight);
            let kind = Kind { experts: param.identity.is_of_experts(), scope, dtype: tensors[0].dtype() };
            let at = all.iter().position(|whole| whole.kind == kind).unwrap_or_else(|| {
                let (name, weights, tensors) = (param.identity.name().to_string(), Vec::new(), Vec::new());
                all.push(Whole { kind, name, weights, tensors });
                all.len() - 1
            });
            all[at].weights.push((param.identity.id, form));
            all[at].tensors.extend(tensors);
        }
    }
    all.into_iter().map(|whole| FrozenBucket::new(unit[0].identity.id.unit, whole, ranks)).collect()
}

impl FrozenBucket {
    fn new(unit: UnitId, whole: Whole, ranks: &Ranks) -> Result<FrozenBucket> {
        let Whole { kind, name, weights, tensors } = whole;
        let (group, device) = (ranks.shard_group(kind.experts), tensors[0].device().clone());
        let slices = Slices::new(tensors.iter().map(Tensor::len), group.size());
        let first = group.rank() * slices.slice_len();
        let _scope = device.scope(kind.scope);
        let mut slice = Tensor::empty(&device, &[slices.slice_len()], kind.dtype)?;
        for ((tensor, at), owned) in tensors.iter().zip(slices.matrices()).zip(slices.owned(group.rank())) {
            if !owned.is_empty() {
                let flat = tensor.reshape(&[tensor.len()])?;
                slice.copy_from(at.start + owned.start - first, &flat.rows(owned.start, owned.end)?)?;
            }
        }
        Ok(FrozenBucket { unit, kind, name, weights, slices, slice })
    }

    /// Returns the number of bytes in the buffer that ranks gather.
    pub(super) fn gathered_bytes(&self) -> usize {
        self.slices.padded_len() * self.kind.dtype.size()
    }

    fn group<'a>(&self, ranks: &'a Ranks) -> &'a Group {
        ranks.shard_group(self.kind.experts)
    }

    /// Starts to gather the weights.
    pub(super) fn start(&self, ranks: &Ranks) -> Result<Pending> {
        let group = self.group(ranks);
        let mut buffer = group.symmetric(self.slice.device(), &[self.slices.padded_len()], self.kind.dtype)?;
        buffer.copy_from(group.rank() * self.slices.slice_len(), &self.slice)?;
        Ok(group.all_gather(&self.name, buffer)?)
    }

    /// Waits for a gather that [`FrozenBucket::start`] started, and adds the weights to `loan`.
    pub(super) fn lend(&self, gather: Pending, loan: &mut Loan) -> Result<()> {
        let mut parts = gather.wait()?.split(self.slices.matrices())?.into_iter();
        self.weights.iter().try_for_each(|(param, form)| {
            loan.add(*param, form.join(&mut parts)?);
            Ok(())
        })
    }
}
