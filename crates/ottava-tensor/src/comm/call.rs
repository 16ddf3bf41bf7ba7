//! What a rank asks of its group: one collective with its name, type and size.

use crate::dtype::DType;
use std::fmt;

/// How [`Group::all_reduce`](super::Group::all_reduce) combines the values of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum, added in rank order in F32 (F64 for F64) and rounded once. F64, F32, F16 and BF16. On GPUs NCCL chooses the order and
    /// may round in between; sums of two ranks have the same bits.
    Sum,
    /// The largest; NaN if any is NaN. F64, F32, I64 and I32. On GPUs floats must be NaN or not negative, without a sign bit, as amaxes
    /// are: they are compared as integers, which keeps NaN where NCCL's maximum would lose it.
    Max,
}

/// A kind of collective, with the argument that all ranks must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    AllGather,
    ReduceScatter { output: DType },
    AllReduce(Reduce),
    AllToAll,
    Broadcast { root: usize },
    Barrier,
    Agree,
}

/// One collective as a rank calls it. All ranks must call equal ones in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub op: Op,
    /// The tensor or unit that it serves, for messages.
    pub name: String,
    /// Type of the elements; `None` for calls without tensors.
    pub dtype: Option<DType>,
    /// Elements of the whole buffer, which all ranks together send or receive.
    pub elements: usize,
}

/// Types that can be summed.
const SUMMED: &[DType] = &[DType::F64, DType::F32, DType::F16, DType::BF16];

/// Types that have a maximum.
const ORDERED: &[DType] = &[DType::F64, DType::F32, DType::I64, DType::I32];

impl Call {
    /// A call without tensors.
    pub fn control(op: Op, name: &str) -> Call {
        Call { op, name: name.into(), dtype: None, elements: 0 }
    }

    /// Kind and name, as "all_gather `layers.3`".
    pub fn title(&self) -> String {
        let kind = match self.op {
            Op::AllGather => "all_gather",
            Op::ReduceScatter { .. } => "reduce_scatter",
            Op::AllReduce(Reduce::Sum) => "all_reduce",
            Op::AllReduce(Reduce::Max) => "all_reduce (max)",
            Op::AllToAll => "all_to_all",
            Op::Broadcast { .. } => "broadcast",
            Op::Barrier => "barrier",
            Op::Agree => "agree",
        };
        format!("{kind} `{}`", self.name)
    }

    /// Checks type and size against a group of `size` ranks; the error is a sentence.
    pub fn check(&self, size: usize) -> Result<(), String> {
        let among = |accepted: &[DType]| match self.dtype {
            Some(dtype) if accepted.contains(&dtype) => Ok(()),
            Some(dtype) => {
                let names: Vec<_> = accepted.iter().map(|accepted| accepted.name()).collect();
                Err(format!("{} is of {dtype}, expected {}", self.title(), names.join(", ")))
            }
            None => Err(format!("{} has no tensor", self.title())),
        };
        match self.op {
            Op::ReduceScatter { output } => {
                among(SUMMED)?;
                if output != DType::F32 && Some(output) != self.dtype {
                    return Err(format!("{self}: the output is {output}, expected float32 or the input's type"));
                }
            }
            Op::AllReduce(Reduce::Sum) => among(SUMMED)?,
            Op::AllReduce(Reduce::Max) => among(ORDERED)?,
            Op::Broadcast { root } if root >= size => {
                return Err(format!("{self}: the group has {size} ranks"));
            }
            _ => {}
        }
        let split = matches!(self.op, Op::AllGather | Op::ReduceScatter { .. } | Op::AllToAll);
        if split && !self.elements.is_multiple_of(size) {
            return Err(format!("{self}: the elements do not split into {size} equal slices"));
        }
        Ok(())
    }

    /// Bytes of the whole buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.elements * self.dtype.map_or(0, DType::size)
    }

    /// Bytes that `rank` of `size` contributes; `None` where any number may come.
    pub fn sent_bytes(&self, rank: usize, size: usize) -> Option<usize> {
        match self.op {
            Op::AllGather => Some(self.buffer_bytes() / size),
            Op::ReduceScatter { .. } | Op::AllReduce(_) | Op::AllToAll => Some(self.buffer_bytes()),
            Op::Broadcast { root } => Some(if rank == root { self.buffer_bytes() } else { 0 }),
            Op::Barrier => Some(0),
            Op::Agree => None,
        }
    }
}

impl fmt::Display for Call {
    /// All that ranks must agree on, as "reduce_scatter `layers.3` of 512 bfloat16 to float32".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title())?;
        if let Some(dtype) = self.dtype {
            write!(f, " of {} {dtype}", self.elements)?;
        }
        match self.op {
            Op::ReduceScatter { output } if Some(output) != self.dtype => write!(f, " to {output}"),
            Op::Broadcast { root } => write!(f, " from rank {root}"),
            _ => Ok(()),
        }
    }
}
