//! Calls of GPUs of one machine that are done by copies to each other's symmetric memory.
//!
//! All-gathers, all-to-alls and reduce-scatters of GPUs of one host are peer copies instead of NCCL kernels, because NCCL kernels take
//! multiprocessors from GEMMs: 24 of the 132 of an H200 for tensor parallelism.
//!
//! A GPU can write to memory of another process only if it has opened this memory by CUDA IPC. So `Group::symmetric` allocates receive buffers from a
//! heap (`cuda/symmetric.rs`) whose blocks are opened once and stay open. Ranks allocate and free in the same order, so their block numbers agree.
//! The flag "ready to be written" contains the block number. If block numbers differ, ranks wait until `collective_timeout` ends the job, and
//! overwrite no memory.
//!
//! Flags are words in device memory that streams write and wait for (`cuStreamWriteValue32`, `cuStreamWaitValue32`). CUDA graphs capture these calls.
//! NCCL's own copy-engine collectives (zero-CTA) are not used: in NCCL 2.28, eager and captured calls share flags and cannot be mixed.

use super::call::{Call, Op};
use super::gpu::{Gpu, Meeting};
use super::group::Group;
use super::inbox::{Inbox, number};
use super::pending::{Parts, Pending, Progress};
use crate::cuda::{PeerCopy, Peers, Place, Transfer};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;
use std::fs;
use std::sync::Arc;

/// The number of GPUs of a node that plans assume.
pub const GPUS_PER_NODE: usize = 8;

/// The maximum number of bytes of the parts of one sum. Parts take memory until they are added, which large models lack. NCCL computes larger sums.
const MOST_PARTS: usize = 512 << 20;

/// The types that GPUs sum by [`sum_parts`](crate::ops::sum_parts).
const SUMMED: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

impl Group {
    /// Creates an uninitialised tensor to which the GPUs of all ranks of the group may copy. All ranks call it with the same sizes, in the same
    /// order, and drop the tensors in the same order.
    ///
    /// If the ranks are processes of one machine whose GPUs reach each other's memory, the GPUs' copy engines execute a gather or all-to-all into
    /// such a tensor, which takes no multiprocessors. Otherwise the tensor is like any other tensor. The memory of dropped tensors is kept for later
    /// tensors.
    pub fn symmetric(&self, device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let Device::Cuda(gpu) = device else { return Tensor::empty(device, shape, dtype) };
        if self.size() == 1 || bytes == 0 {
            return Tensor::empty(device, shape, dtype);
        }
        let peers = self.peers()?;
        let (buffer, new) = self.heap.take(gpu, bytes)?;
        if let (Some(peers), Some(address)) = (peers, new) {
            let all = self.agree("symmetric memory", &peers.export(address)?)?;
            peers.add_block(address, &all)?;
        }
        Ok(Tensor::over(buffer, shape, dtype))
    }

    /// Frees the symmetric memory of this group. All ranks call it when no tensor uses the memory. If a tensor still uses it, it does nothing.
    pub fn free_symmetric(&self) -> Result<()> {
        let blocks = self.heap.take_blocks();
        if let (Some(peers), false) = (self.met(), blocks.is_empty()) {
            peers.device().synchronize()?;
            peers.close_blocks()?;
            // A rank must not free memory that another rank has open.
            self.barrier("the end of symmetric memory")?;
        }
        Ok(())
    }

    /// Creates an [`Inbox`] for parts of `elements` elements from each other rank, in [symmetric memory](Group::symmetric).
    pub fn inbox(&self, device: &Device, elements: usize, dtype: DType) -> Result<Inbox<'_>> {
        Inbox::new(self, self.symmetric(device, &[(self.size() - 1) * elements], dtype)?)
    }

    /// Returns the other ranks, if the GPUs copy to each other's memory. All ranks must make the first call.
    pub(super) fn peers(&self) -> Result<Option<Arc<Peers>>> {
        let Some(gpu) = &self.gpu else { return Ok(None) };
        let mut meeting = gpu.meeting();
        if let Meeting::Due = *meeting {
            *meeting = Meeting::Over(gpu.device.count_library_memory(|| self.meet(gpu))?.map(Arc::new));
        }
        Ok(match &*meeting {
            Meeting::Over(peers) => peers.clone(),
            Meeting::Due => None,
        })
    }

    /// Opens the memory of the other ranks. Returns `None` on all ranks if one rank cannot.
    fn meet(&self, gpu: &Gpu) -> Result<Option<Peers>> {
        // Processes of one machine read the same value, even in containers.
        let machine = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let new = Peers::new(&gpu.device, self.rank(), self.size()).ok().filter(|_| !machine.is_empty());
        let offer = new.as_ref().map_or(Vec::new(), |(_, exported)| [&machine[..], exported].concat());
        let offers = self.agree("the machine and memory of GPUs", &offer)?;
        let exported: Option<Vec<_>> =
            offers.iter().map(|offer| offer.strip_prefix(&machine[..]).map(<[u8]>::to_vec)).collect();
        let met = match (new, exported) {
            (Some((mut peers, _)), Some(all)) => peers.meet(&all).is_ok().then_some(peers),
            _ => None,
        };
        let all = self.agree("open memory of GPUs", &[u8::from(met.is_some())])?;
        Ok(met.filter(|_| all.iter().all(|met| met == &[1])))
    }

    /// Returns the other ranks, if they have opened each other's memory.
    fn met(&self) -> Option<Arc<Peers>> {
        match &*self.gpu.as_ref()?.meeting() {
            Meeting::Over(peers) => peers.clone(),
            Meeting::Due => None,
        }
    }

    /// Returns the other ranks and the place of `tensor` in symmetric memory, if ranks copy to it.
    pub(super) fn reached(&self, tensor: &Tensor) -> Option<(Arc<Peers>, Place)> {
        self.met().and_then(|peers| Some((peers, self.heap.find(tensor.device_ptr())?)))
    }

    /// Starts a checked call by copies between GPUs. Returns `None` if copies are not possible: the call must gather or exchange slices in symmetric
    /// memory, or sum slices that are not too large. In a dry run, it only allocates memory.
    pub(super) fn start_by_copies(
        &self,
        call: &Call,
        input: Option<&Tensor>,
        output: &mut Tensor,
    ) -> Result<Option<Progress>> {
        let (rank, slice, bytes) = (self.rank(), call.elements / self.size(), call.buffer_bytes() / self.size());
        let at = |slice: usize| (slice * bytes) as u64;
        let from_input = |input: &Tensor, peer| input.device_ptr() + at(peer);
        if let (Op::ReduceScatter { .. }, Some(input)) = (call.op, input) {
            let fits = (self.size() - 1) * bytes <= MOST_PARTS;
            if !fits || !SUMMED.contains(&output.dtype()) || !self.reaches(input.device())? {
                return Ok(None);
            }
            let others = self.symmetric(input.device(), &[(self.size() - 1) * slice], input.dtype())?;
            let slices = |reached| {
                let to = |peer| at(number(rank, peer));
                self.copy_slices("copies of a reduce-scatter", reached, bytes, |peer| from_input(input, peer), to)
            };
            let transfer = self.reached(&others).map(slices).transpose()?;
            let own = elements(input, rank * slice, slice)?;
            return Ok(Some(Progress::Parts(Box::new(Parts { transfer, own, rank, others }))));
        }
        let (Op::AllGather | Op::AllToAll, Some((peers, place))) = (call.op, self.reached(output)) else {
            return Ok(None);
        };
        let (first, to) = (output.device_ptr(), |_| place.offset + at(rank));
        let transfer = match input {
            Some(input) => {
                output.copy_to_elements(rank * slice, &elements(input, rank * slice, slice)?)?;
                let from = |peer| from_input(input, peer);
                self.copy_slices("copies of an all-to-all", (peers, place), bytes, from, to)?
            }
            None => self.copy_slices("copies of a gather", (peers, place), bytes, |_| first + at(rank), to)?,
        };
        Ok(Some(Progress::Gpu(transfer)))
    }

    /// Starts to copy `bytes` to each other rank, from an address of this rank to an offset in the block of `place`, and to receive from the other
    /// ranks.
    fn copy_slices(
        &self,
        name: &'static str,
        (peers, place): (Arc<Peers>, Place),
        bytes: usize,
        from: impl Fn(usize) -> u64,
        to: impl Fn(usize) -> u64,
    ) -> Result<Transfer> {
        let others: Vec<_> = (1..self.size()).map(|step| (self.rank() + step) % self.size()).collect();
        let copy = |&peer: &usize| PeerCopy { peer, from: from(peer), to: Place { offset: to(peer), ..place }, bytes };
        let copies: Vec<_> = others.iter().map(copy).collect();
        // SAFETY: the call was checked: its buffers have these bytes. `Pending` holds them until the transfer ends. No other view can write the
        // output, whose other slices are written by other ranks, and an input is only read.
        unsafe { peers.copy(name, &copies, &others, place.block) }
    }

    /// Returns whether sums are computed by copies: if GPUs reach each other's memory. In a dry run, this is so if all ranks are on one node.
    pub(super) fn reaches(&self, device: &Device) -> Result<bool> {
        let (ranks, node) = (self.ranks(), |rank: usize| rank / GPUS_PER_NODE);
        Ok(match device {
            _ if ranks.len() == 1 => false,
            Device::Cuda(_) if self.endpoint.dry => ranks.iter().all(|&rank| node(rank) == node(ranks[0])),
            Device::Cuda(_) => self.peers()?.is_some(),
            Device::Cpu | Device::DryCpu(_) => false,
        })
    }

    /// Starts to send `input` to rank `to` of the group, and to receive `output` from rank `from`. The output is in symmetric memory that was
    /// [reached](Group::reached). The input is written at the given byte of the same block of its receiver.
    pub(super) fn start_exchange_by_copies(
        &self,
        calls: [&Call; 2],
        [to, from]: [usize; 2],
        input: &Tensor,
        output: Tensor,
        ((peers, place), at): ((Arc<Peers>, Place), usize),
    ) -> Result<Pending> {
        calls.into_iter().for_each(|call| self.note(call));
        let copy = PeerCopy {
            peer: to,
            from: input.device_ptr(),
            to: Place { offset: at as u64, ..place },
            bytes: input.bytes(),
        };
        // SAFETY: as for `copy_slices`; only rank `from` writes the output.
        let transfer = unsafe { peers.copy("copies of an exchange", &[copy], &[from], place.block)? };
        Ok(Pending { progress: Progress::Gpu(transfer), output, _input: Some(input.clone()) })
    }
}

/// Returns `count` elements of a tensor from `start` on, as a flat view.
fn elements(tensor: &Tensor, start: usize, count: usize) -> Result<Tensor> {
    tensor.reshape(&[tensor.len()])?.rows(start, start + count)
}
