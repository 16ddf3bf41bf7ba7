//! A call of a rank in a group: one collective or message with its name, type and size.

use super::members::Members;
use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The operation with which [`Group::all_reduce`](super::Group::all_reduce) combines the values of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduce {
    /// The sum, for F64, F32, F16 and BF16. The values are added in rank order in F32 (F64 for F64) and rounded once. On GPUs, NCCL determines the
    /// order and may round partial sums. Sums over two ranks have the same bits as on the CPU.
    Sum,
    /// The largest value, or NaN if a value is NaN, for F64, F32, I64 and I32. On GPUs, floats must have no sign bit, like amaxes. They are compared
    /// as integers, which keeps NaN. NCCL's floating-point maximum would lose NaN.
    Max,
}

/// A kind of collective with the argument that must be equal on all ranks, or one side of a message. Ranks are numbered as in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Op {
    AllGather,
    ReduceScatter { output: DType },
    AllReduce(Reduce),
    AllToAll,
    Broadcast { root: usize },
    Announce { root: usize },
    Barrier,
    Agree,
    Split,
    Send { to: usize },
    Receive { from: usize },
}

/// A separately numbered sequence of calls: the collectives of a group, or the messages from one of its ranks to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Channel {
    /// The number of the group.
    pub group: u64,
    /// The sender and the receiver, for messages.
    pub pair: Option<(usize, usize)>,
}

/// A call of a rank. All ranks of a channel must make [matching](Call::fits) calls in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Call {
    pub op: Op,
    /// The tensor or unit, for error messages.
    pub name: String,
    /// The type of the elements. `None` for calls without tensors.
    pub dtype: Option<DType>,
    /// The number of elements of the whole buffer, the union over all ranks.
    pub elements: usize,
}

/// The types that can be summed.
const SUMMED: &[DType] = &[DType::F64, DType::F32, DType::F16, DType::BF16];

/// The types that have a maximum.
const ORDERED: &[DType] = &[DType::F64, DType::F32, DType::I64, DType::I32];

impl Call {
    /// Creates a call without tensors.
    pub fn control(op: Op, name: &str) -> Call {
        Call { op, name: name.into(), dtype: None, elements: 0 }
    }

    /// Returns the channel of the call that `rank` makes in `group`.
    pub fn channel(&self, rank: usize, group: &Members) -> Channel {
        let pair = match self.op {
            Op::Send { to } => Some((rank, to)),
            Op::Receive { from } => Some((from, rank)),
            _ => None,
        };
        Channel { group: group.id, pair }
    }

    /// Returns whether this call matches the call `other` of another rank of the channel.
    pub fn fits(&self, other: &Call) -> bool {
        let is_message = |call: &Call| matches!(call.op, Op::Send { .. } | Op::Receive { .. });
        let ops_fit = self.op == other.op || is_message(self) && is_message(other);
        ops_fit && (&self.name, self.dtype, self.elements) == (&other.name, other.dtype, other.elements)
    }

    /// Returns the call that `rank` must make if rank `other` makes this call.
    pub fn counterpart(&self, rank: usize, other: usize) -> Call {
        let op = match self.op {
            Op::Send { to } if to == rank => Op::Receive { from: other },
            Op::Receive { from } if from == rank => Op::Send { to: other },
            op => op,
        };
        Call { op, ..self.clone() }
    }

    fn kind(&self) -> &'static str {
        match self.op {
            Op::AllGather => "all_gather",
            Op::ReduceScatter { .. } => "reduce_scatter",
            Op::AllReduce(Reduce::Sum) => "all_reduce",
            Op::AllReduce(Reduce::Max) => "all_reduce (max)",
            Op::AllToAll => "all_to_all",
            Op::Broadcast { .. } => "broadcast",
            Op::Announce { .. } => "announce",
            Op::Barrier => "barrier",
            Op::Agree => "agree",
            Op::Split => "split",
            Op::Send { .. } => "send",
            Op::Receive { .. } => "receive",
        }
    }

    /// Returns kind and name, for example "all_gather `layers.3`".
    pub fn title(&self) -> String {
        format!("{} `{}`", self.kind(), self.name)
    }

    /// Returns the name of the call, its number in its channel, and its group, for example "all_reduce `grad norm`, collective 17", or "send `x` to
    /// rank 5, message 2 of group `tensor` (ranks 4 to 7)".
    pub fn numbered(&self, number: u64, group: &Members) -> String {
        let (peer, kind) = match self.op {
            Op::Send { to } => (format!(" to rank {to}"), "message"),
            Op::Receive { from } => (format!(" from rank {from}"), "message"),
            _ => (String::new(), "collective"),
        };
        format!("{}{peer}, {kind} {number}{group}", self.title())
    }

    /// Checks type, size and peer for `group`. The error is a sentence.
    pub fn check(&self, group: &Members) -> Result<(), String> {
        let size = group.ranks.len();
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
            Op::Broadcast { root: peer }
            | Op::Announce { root: peer }
            | Op::Send { to: peer }
            | Op::Receive { from: peer }
                if group.place(peer).is_none() =>
            {
                return Err(format!("{self}{group}: that rank is not in the group"));
            }
            _ => {}
        }
        let split = matches!(self.op, Op::AllGather | Op::ReduceScatter { .. } | Op::AllToAll);
        if split && !self.elements.is_multiple_of(size) {
            return Err(format!("{self}: the elements do not split into {size} equal slices"));
        }
        Ok(())
    }

    /// Returns the number of bytes of the whole buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.elements * self.dtype.map_or(0, DType::size)
    }

    /// Returns the number of bytes that `rank` contributes in a group of `size`, or `None` if any number is allowed.
    pub fn sent_bytes(&self, rank: usize, size: usize) -> Option<usize> {
        match self.op {
            Op::AllGather => Some(self.buffer_bytes() / size),
            Op::ReduceScatter { .. } | Op::AllReduce(_) | Op::AllToAll | Op::Send { .. } => Some(self.buffer_bytes()),
            Op::Broadcast { root } => Some(if rank == root { self.buffer_bytes() } else { 0 }),
            Op::Announce { root } => (rank != root).then_some(0),
            Op::Barrier | Op::Receive { .. } => Some(0),
            Op::Split => Some(2 * size_of::<u64>()),
            Op::Agree => None,
        }
    }
}

impl fmt::Display for Call {
    /// Writes everything that must be equal on all ranks, for example "reduce_scatter `layers.3` of 512 bfloat16 to float32".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title())?;
        if let Some(dtype) = self.dtype {
            write!(f, " of {} {dtype}", self.elements)?;
        }
        match self.op {
            Op::ReduceScatter { output } if Some(output) != self.dtype => write!(f, " to {output}"),
            Op::Broadcast { root: from } | Op::Announce { root: from } | Op::Receive { from } => {
                write!(f, " from rank {from}")
            }
            Op::Send { to } => write!(f, " to rank {to}"),
            _ => Ok(()),
        }
    }
}
