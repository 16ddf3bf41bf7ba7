//! The weights and gradients of a parameter in their storage formats, as the ops of an update read and write them.

use crate::stored::{ExpandedTensor, ScaledTensor};
use crate::{DType, Device, Error, Result, Tensor};

/// The weights of a parameter in their storage format.
#[derive(Debug)]
pub enum UpdatedWeight<'a> {
    /// F32 master weights.
    Master {
        /// The master weights, F32.
        master: &'a mut Tensor,
        /// The copy that layers read.
        copy: WeightCopy<'a>,
    },
    /// Scaled F16, updated in F32 and rounded to nearest. Layers read these values.
    Scaled {
        /// The weights, F16.
        master: &'a mut ScaledTensor,
        /// The copy that layers read.
        copy: WeightCopy<'a>,
    },
    /// F32 split into a BF16 half that layers read (nearest, ties away from zero) and the remaining bits.
    Split {
        /// The weights, BF16.
        weight: &'a mut Tensor,
        /// The remainder, I16: added to the bits of the BF16 value as an F32.
        rest: &'a mut Tensor,
    },
    /// BF16 with stochastic rounding, so that small updates count on average.
    Stochastic {
        /// The weights, BF16.
        weight: &'a mut Tensor,
    },
}

/// The copy of the weights that layers read.
#[derive(Debug)]
pub enum WeightCopy<'a> {
    /// Stored in the type of this tensor.
    Stored(&'a mut Tensor),
    /// Computed on demand in this type: F32, F16 or BF16.
    OnDemand(DType),
}

impl WeightCopy<'_> {
    pub(super) fn dtype(&self) -> DType {
        match self {
            WeightCopy::Stored(copy) => copy.dtype(),
            WeightCopy::OnDemand(dtype) => *dtype,
        }
    }

    pub(super) fn stored(&mut self) -> Option<&mut Tensor> {
        match self {
            WeightCopy::Stored(copy) => Some(copy),
            WeightCopy::OnDemand(_) => None,
        }
    }
}

impl UpdatedWeight<'_> {
    /// Returns the type in which layers read the weights.
    pub(super) fn read_dtype(&self) -> DType {
        match self {
            UpdatedWeight::Master { copy, .. } | UpdatedWeight::Scaled { copy, .. } => copy.dtype(),
            UpdatedWeight::Split { .. } | UpdatedWeight::Stochastic { .. } => DType::BF16,
        }
    }
}

/// The gradient of a parameter.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// F32 or BF16.
    Plain(&'a Tensor),
    /// Scaled E4M3.
    Scaled(&'a ScaledTensor),
}

impl<'a> Gradient<'a> {
    /// Returns the stored values.
    pub fn values(self) -> &'a Tensor {
        match self {
            Gradient::Plain(values) | Gradient::Scaled(ScaledTensor { values, .. }) => values,
        }
    }
}

/// The start of a slice is a multiple of this number of elements.
pub(super) const SLICE_UNIT: usize = 128;

impl UpdatedWeight<'_> {
    /// Checks the weights of a parameter, or of a slice of a parameter. `shape` is the shape that they must have.
    pub(super) fn expect(&self, op: &str, shape: &[usize], device: &Device) -> Result<()> {
        let tensor = |what: &str, tensor: &Tensor, dtypes: &[DType]| {
            expect_plain(&format!("{op}: {what}"), tensor, dtypes, shape, device)
        };
        let copied = |copy: &WeightCopy| match copy {
            WeightCopy::Stored(copy) => tensor("copy", copy, &[DType::F32, DType::F16, DType::BF16]),
            WeightCopy::OnDemand(DType::F32 | DType::F16 | DType::BF16) => Ok(()),
            WeightCopy::OnDemand(other) => Err(Error::Value(format!("{op}: layers cannot read weights in {other}"))),
        };
        match self {
            UpdatedWeight::Master { master, copy } => {
                tensor("master", master, &[DType::F32])?;
                copied(copy)
            }
            UpdatedWeight::Scaled { master, copy } => {
                expect_scaled(&format!("{op}: master"), master, DType::F16, shape, device)?;
                copied(copy)
            }
            UpdatedWeight::Split { weight, rest } => {
                tensor("weight", weight, &[DType::BF16])?;
                tensor("rest of the weight", rest, &[DType::I16])
            }
            UpdatedWeight::Stochastic { weight } => tensor("weight", weight, &[DType::BF16]),
        }
    }
}

impl Gradient<'_> {
    /// Checks the type and the device of the gradient.
    pub(super) fn expect(self, op: &str, device: &Device) -> Result<()> {
        let (what, shape) = (format!("{op}: grad"), self.values().shape());
        match self {
            Gradient::Plain(grad) => expect_plain(&what, grad, &[DType::F32, DType::BF16], shape, device),
            Gradient::Scaled(grad) => expect_scaled(&what, grad, DType::E4M3, shape, device),
        }
    }
}

/// Checks a tensor without a scale.
pub(super) fn expect_plain(
    what: &str,
    tensor: &Tensor,
    dtypes: &[DType],
    shape: &[usize],
    device: &Device,
) -> Result<()> {
    tensor.expect(what, shape)?;
    tensor.expect_dtype(what, dtypes)?;
    tensor.expect_device(what, device)
}

/// Checks a tensor with one scale.
pub(super) fn expect_scaled(
    what: &str,
    x: &ScaledTensor,
    dtype: DType,
    shape: &[usize],
    device: &Device,
) -> Result<()> {
    expect_plain(what, &x.values, &[dtype], shape, device)?;
    expect_plain(what, &x.scale_inv, &[DType::F32], &[1], device)
}

/// Checks a tensor with expanded ranges.
pub(super) fn expect_expanded(what: &str, x: &ExpandedTensor, shape: &[usize], device: &Device) -> Result<()> {
    expect_plain(what, &x.codes, &[DType::U8], shape, device)?;
    let [rows, columns] = x.codes.dims(what)?;
    expect_plain(what, &x.groups, &[DType::I32], &ExpandedTensor::groups_shape(rows, columns), device)
}

/// Checks the index of the first element of a slice.
pub(super) fn expect_slice(op: &str, offset: usize) -> Result<()> {
    match offset.is_multiple_of(SLICE_UNIT) {
        true => Ok(()),
        false => Err(Error::Value(format!("{op}: a slice starts at element {offset}, not at a multiple of 128"))),
    }
}
