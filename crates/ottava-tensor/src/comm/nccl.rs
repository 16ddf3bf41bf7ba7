//! Collectives and messages of GPU tensors, by NCCL.

use super::call::{Call, Op, Reduce};
use super::gpu::Gpu;
use super::group::Group;
use super::pending::{Pending, Progress};
use crate::cuda::{Beside, Collective, CudaDevice, Message, NcclComm, NcclId, NcclOp, require_nccl};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, RankFault, Result};
use crate::tensor::Tensor;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// The bytes per rank of the first collectives. NCCL uses different connections for small and large collectives.
const FIRST_BYTES: [usize; 2] = [1 << 10, 16 << 20];

impl Group {
    /// Enables collectives of GPU tensors in this group, and in groups that are later [split](Group::split) from it. Each rank calls it with
    /// its own GPU as `device`. Collectives of CPU tensors, barriers and agreements do not change. A group of one rank or of a dry run sends
    /// nothing and is returned unchanged.
    ///
    /// Runs one collective of each kind, so that NCCL allocates its memory, which reduces [`CudaDevice::usable_memory`].
    ///
    /// Starts [`Group::watch`] with `exit_code` if it has not been started.
    ///
    /// Errors with [`Error::Library`] without NCCL, and with [`Error::Ranks`] if another rank has no NCCL or is lost.
    pub fn with_gpu(mut self, device: &Arc<CudaDevice>, exit_code: u8) -> Result<Group> {
        if self.size() == 1 || self.endpoint.dry {
            return Ok(self);
        }
        self.endpoint.watch_gpu(device, exit_code)?;
        self.gpu = Some(Gpu::new(device.clone()));
        self.communicator()?;
        Ok(self)
    }

    /// Returns this rank's communicator, or `None` without GPUs. The first call creates the communicator, and all ranks of the group must make this
    /// call.
    pub(super) fn communicator(&self) -> Result<Option<Arc<NcclComm>>> {
        let Some(gpu) = &self.gpu else { return Ok(None) };
        if let Some(comm) = &*gpu.communicator() {
            return Ok(Some(comm.clone()));
        }
        let device = &gpu.device;
        self.expect_uncaptured(device)?;
        self.peers()?;
        let id = self.share_id()?;
        let before = self.traffic();
        let comm = device.count_library_memory(|| {
            let comm = Arc::new(NcclComm::join(device, id, self.rank(), self.size(), gpu.beside)?);
            *gpu.communicator() = Some(comm.clone());
            let gpu_device = Device::Cuda(device.clone());
            FIRST_BYTES.into_iter().try_for_each(|bytes| match gpu.beside {
                Beside::Channel(_) => self.connect_pair(&gpu_device, bytes),
                Beside::Kernels | Beside::Product | Beside::Nothing => self.connect(&comm, &gpu_device, bytes),
            })?;
            Ok(comm)
        })?;
        *self.endpoint.traffic() = before;
        Ok(Some(comm))
    }

    /// Errors if a graph is being captured, before the group allocates memory.
    pub(super) fn expect_uncaptured(&self, device: &CudaDevice) -> Result<()> {
        if !device.is_capturing()? {
            return Ok(());
        }
        let name = self.name();
        Err(Error::Value(format!(
            "group `{name}` must send and sum tensors of GPUs once before it is captured in a graph"
        )))
    }

    /// Returns the id from the group's rank 0. If a rank has no NCCL, all ranks error before one of them waits in NCCL.
    fn share_id(&self) -> Result<NcclId> {
        let own =
            if self.rank() == 0 { NcclId::new().map(|id| id.0.to_vec()) } else { require_nccl().map(|()| Vec::new()) };
        // A rank sends a byte 1, followed by the id on rank 0. A rank without NCCL sends a byte 0 and its error message.
        let sent = own.as_ref().map_or_else(|e| format!("\0{e}").into_bytes(), |id| [&[1], id.as_slice()].concat());
        let all = self.agree("NCCL's id", &sent)?;
        own?;
        if let Some((rank, problem)) =
            all.iter().enumerate().find_map(|(rank, sent)| Some((rank, sent.strip_prefix(&[0])?)))
        {
            let message = format!("rank {}: {}", self.ranks()[rank], String::from_utf8_lossy(problem));
            return Err(Error::Ranks { fault: RankFault::Rendezvous, message, recent: self.recent() });
        }
        match all[0].get(1..).and_then(|id| id.try_into().ok()) {
            Some(id) => Ok(NcclId(id)),
            None => Err(Error::Ranks {
                fault: RankFault::Rendezvous,
                message: format!("rank {} sent no id of NCCL; start all ranks with the same binary", self.ranks()[0]),
                recent: self.recent(),
            }),
        }
    }

    /// Runs one collective of each kind with slices of `bytes`, and waits for them.
    fn connect(&self, nccl: &NcclComm, device: &Device, bytes: usize) -> Result<()> {
        let zeros = |dtype: DType, slices: usize| Tensor::zeros(device, &[slices * bytes / dtype.size()], dtype);
        for dtype in [DType::F32, DType::BF16] {
            self.all_reduce("connect", Reduce::Sum, zeros(dtype, 1)?)?.wait()?;
            let (input, mut output) = (zeros(dtype, self.size())?, zeros(dtype, 1)?);
            let call = self.call(Op::ReduceScatter { output: dtype }, "connect", &input)?;
            // A small reduce-scatter would be done by copies, so it is enqueued directly.
            let progress = self.enqueue(nccl, &call, Some(&input), &mut output)?;
            Pending { progress, output, _input: Some(input) }.wait()?;
        }
        self.all_reduce("connect", Reduce::Max, zeros(DType::F32, 1)?)?.wait()?;
        self.all_gather("connect", zeros(DType::E4M3, self.size())?)?.wait()?;
        self.all_to_all("connect", &zeros(DType::E4M3, self.size())?, zeros(DType::E4M3, self.size())?)?.wait()?;
        self.broadcast("connect", 0, zeros(DType::E4M3, 1)?)?.wait()?;
        device.synchronize()
    }

    /// Exchanges messages of `bytes` between the two ranks of a channel, and waits for them.
    fn connect_pair(&self, device: &Device, bytes: usize) -> Result<()> {
        let zeros = || Tensor::zeros(device, &[bytes], DType::E4M3);
        let peer = 1 - self.rank();
        self.exchange("connect", peer, &zeros()?, peer, zeros()?)?.wait()?;
        device.synchronize()
    }

    /// Starts a checked call on tensors that are not on the CPU.
    pub(super) fn start_on_gpu(&self, call: &Call, input: Option<&Tensor>, mut output: Tensor) -> Result<Pending> {
        if let Some(input) = input {
            output.expect_device(&format!("{}: output", call.title()), input.device())?;
            if output.dtype() != input.dtype() {
                let (from, to) = (input.dtype(), output.dtype());
                return Err(Error::Value(format!("{call}: GPUs sum {from} to {from}, and the output is {to}")));
            }
        }
        self.note(call);
        let communicator = self.communicator()?;
        if let Some(progress) = self.start_by_copies(call, input, &mut output)? {
            return Ok(Pending { progress, output, _input: input.cloned() });
        }
        let progress = match communicator {
            _ if output.is_empty() || self.endpoint.dry => Progress::Done,
            None => {
                // The group has one rank.
                input.map_or(Ok(()), |input| output.copy_from(0, input))?;
                Progress::Done
            }
            Some(nccl) => self.enqueue(&nccl, call, input, &mut output)?,
        };
        Ok(Pending { progress, output, _input: input.cloned() })
    }

    /// Enqueues NCCL's collective of a checked `call`. The caller keeps the tensors until the collective ends.
    fn enqueue(&self, nccl: &NcclComm, call: &Call, input: Option<&Tensor>, output: &mut Tensor) -> Result<Progress> {
        let (name, collective) = collective(call, self.ranks(), input, output);
        // SAFETY: the call was checked: the buffers have its bytes. `Pending` holds input and output until the transfer ends, no other
        // view can write the output, and the input is only read.
        Ok(Progress::Gpu(unsafe { nccl.enqueue(name, collective)? }))
    }

    /// Starts checked messages of tensors that are not on the CPU.
    pub(super) fn start_messages_on_gpu(
        &self,
        sent: Option<(&Call, &Tensor)>,
        received: Option<(&Call, Tensor)>,
    ) -> Result<Pending> {
        let input = sent.map(|(_, tensor)| tensor.clone());
        let calls = [sent.map(|(call, _)| call), received.as_ref().map(|(call, _)| *call)];
        calls.into_iter().flatten().for_each(|call| self.note(call));
        let [to, from] = calls.map(|call| call.and_then(|call| self.peer(call)));
        let mut output = received.map(|(_, tensor)| tensor);
        let progress = match self.communicator()? {
            // A group of one rank or of a dry run sends no messages.
            None => Progress::Done,
            Some(nccl) => {
                let message = |address, bytes, peer| Some(Message { address, bytes, peer }).filter(|_| bytes > 0);
                let send = input.as_ref().zip(to).and_then(|(x, to)| message(x.device_ptr(), x.bytes(), to));
                let receive =
                    output.as_mut().zip(from).and_then(|(x, from)| message(x.device_ptr_mut(), x.bytes(), from));
                let name = match (&send, &receive) {
                    (Some(_), Some(_)) => "ncclSend and ncclRecv",
                    (Some(_), None) => "ncclSend",
                    (None, _) => "ncclRecv",
                };
                // SAFETY: the messages have the bytes of their tensors. `Pending` holds the tensors until the transfer ends. No other view can
                // write the received tensor, and the sent tensor is only read.
                Progress::Gpu(unsafe { nccl.enqueue(name, Collective::Messages { send, receive })? })
            }
        };
        let output = output.or_else(|| input.clone()).expect("one of both is given");
        Ok(Pending { progress, output, _input: input })
    }

    /// Returns the index in the group of the other rank of a message.
    fn peer(&self, call: &Call) -> Option<usize> {
        match call.op {
            Op::Send { to: peer } | Op::Receive { from: peer } => self.members.place(peer),
            _ => None,
        }
    }

    /// Records and counts a GPU call.
    pub(super) fn note(&self, call: &Call) {
        self.endpoint.history.note(&self.members, self.endpoint.rank, call);
        self.endpoint.traffic().count(call, self.size());
    }

    /// Returns whether this group supports tensors of `gpu`.
    pub(super) fn has_gpu(&self, gpu: &Arc<CudaDevice>) -> bool {
        self.gpu.as_ref().is_some_and(|own| Arc::ptr_eq(&own.device, gpu))
    }
}

/// Returns NCCL's function for `call`, and the arguments.
fn collective(call: &Call, ranks: &[usize], input: Option<&Tensor>, output: &mut Tensor) -> (&'static str, Collective) {
    let size = ranks.len();
    let (bytes, elements, dtype) = (call.buffer_bytes(), call.elements, output.dtype());
    let buffer = output.device_ptr_mut();
    let input = input.map_or(buffer, Tensor::device_ptr);
    match call.op {
        Op::AllGather => ("ncclAllGather", Collective::AllGather { buffer, slice: bytes / size }),
        Op::ReduceScatter { .. } => {
            let slice = elements / size;
            ("ncclReduceScatter", Collective::ReduceScatter { input, output: buffer, slice, dtype })
        }
        Op::AllReduce(reduce) => {
            // NCCL's floating-point maximum loses NaN. Floats without a sign bit are ordered like their bits, with NaN last.
            let (op, dtype) = match (reduce, dtype) {
                (Reduce::Sum, dtype) => (NcclOp::Sum, dtype),
                (Reduce::Max, DType::F32) => (NcclOp::Max, DType::I32),
                (Reduce::Max, DType::F64) => (NcclOp::Max, DType::I64),
                (Reduce::Max, dtype) => (NcclOp::Max, dtype),
            };
            ("ncclAllReduce", Collective::AllReduce { buffer, elements, dtype, op })
        }
        Op::AllToAll => ("ncclSend and ncclRecv", Collective::AllToAll { input, output: buffer, slice: bytes / size }),
        Op::Broadcast { root } => {
            let root = ranks.iter().position(|&rank| rank == root).expect("a checked root is in the group");
            ("ncclBroadcast", Collective::Broadcast { buffer, bytes, root })
        }
        Op::Send { .. } | Op::Receive { .. } | Op::Announce { .. } | Op::Barrier | Op::Agree | Op::Split => {
            unreachable!("they are no collectives of tensors")
        }
    }
}
