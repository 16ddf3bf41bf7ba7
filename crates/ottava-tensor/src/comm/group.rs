//! One rank's handle of a group.

use super::call::{Call, Channel, Op};
use super::combine::unpack;
use super::endpoint::{Endpoint, Stopper};
use super::fault::Fault;
use super::gpu::Gpu;
use super::history::GpuCalls;
use super::members::{Members, encode_place};
use super::pending::Started;
use super::traffic::Traffic;
use crate::cuda::{Beside, SymmetricHeap};
use crate::device::{Device, MemoryKind};
use crate::error::{Error, RankFault, Result};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// The GPU calls of a rank, by channel.
type Calls = Vec<(Channel, GpuCalls)>;

/// One rank's membership in a group.
///
/// A rank may be in several groups, which [`Group::split`] returns. All groups of a rank share connections, deadlines and the counters of
/// [`Group::traffic`]. The first fault of a job ends the calls of all groups with an error. When a rank drops its last group it leaves the
/// job, and calls of other ranks that need it return an error.
///
/// Tensors are on the CPU, or on the GPU of [`Group::with_gpu`]. In a group of one rank, they may be on any device. `name` names the tensor or unit
/// in error messages and must be the same on all ranks. A call starts immediately. [`Pending::wait`](super::Pending::wait) waits for its end and
/// returns the tensor that it wrote. Several calls may be in progress. Tensors that are written must have no other views.
///
/// Calls error with [`Error::Placement`] for tensors on another device, and with [`Error::Value`] for unsupported types and sizes, before
/// anything is sent. Calls and `wait` error with [`Error::Ranks`] if the job has failed.
pub struct Group {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) members: Arc<Members>,
    /// The index of this rank in the group.
    rank: usize,
    /// The GPU for calls with GPU tensors. `None` without a GPU, or in a group of one rank.
    pub(super) gpu: Option<Gpu>,
    /// The memory of [`Group::symmetric`].
    pub(super) heap: Arc<SymmetricHeap>,
}

impl Group {
    /// Creates the group of all ranks of a job.
    pub(super) fn world(endpoint: Endpoint) -> Group {
        let (rank, members) = (endpoint.rank, Members::world(endpoint.size));
        Group { endpoint: Arc::new(endpoint), members: Arc::new(members), rank, gpu: None, heap: Arc::default() }
    }

    /// Returns the index of this rank, from 0 to `size - 1`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.members.ranks.len()
    }

    /// Returns the name given to [`Group::split`], for error messages. The group of all ranks is called `world`.
    pub fn name(&self) -> &str {
        &self.members.name
    }

    /// Returns the ranks of the group, numbered as in the job, in the order of the group.
    pub fn ranks(&self) -> &[usize] {
        &self.members.ranks
    }

    /// Divides the group, like `MPI_Comm_split`: ranks with the same `colour` form a group, ordered by `key` and then by their rank in this
    /// group. All ranks of this group must call it, and ranks of one colour give the same `name`.
    ///
    /// The new groups use the same GPUs. The NCCL communicator of each group is created in its first call with GPU tensors, which must not be
    /// captured in a graph.
    ///
    /// In a dry run, all other ranks are assumed to have the same colour and key.
    pub fn split(&self, name: &str, colour: usize, key: usize) -> Result<Group> {
        self.split_by(name, |_| (colour, key))
    }

    /// Returns the same group of two ranks for messages in one direction. On GPUs the messages have a separate stream, number `channel` of four,
    /// so that they never wait for communication of other groups.
    pub fn on_channel(self, channel: usize) -> Group {
        self.beside(Beside::Channel(channel))
    }

    /// Sets the work of compute during the group's calls, which decides the GPU resources of the calls. It must be set before the first call.
    pub(super) fn beside(mut self, beside: Beside) -> Group {
        self.gpu.iter_mut().for_each(|gpu| gpu.beside = beside);
        self
    }

    /// Divides the group like [`Group::split`]. `place` returns colour and key of each rank of this group.
    pub(super) fn split_by(&self, name: &str, place: impl Fn(usize) -> (usize, usize)) -> Result<Group> {
        let (endpoint, rank) = (&self.endpoint, self.endpoint.rank);
        let members = if endpoint.link.is_alone() {
            let places: Vec<_> = (0..self.size()).map(place).collect();
            let own = self.members.divide(&places).into_iter().find(|ranks| ranks.contains(&rank));
            let ranks = own.expect("each rank has a colour");
            Members { id: endpoint.number_group(), name: name.into(), ranks }
        } else {
            let place = encode_place(place(self.rank));
            let reply = self.start(Call::control(Op::Split, name), place).wait()?;
            let members = Members::decode(name, &reply);
            members.ok_or_else(|| {
                self.desync(format!("split `{name}` gave no group; start all ranks with the same binary"))
            })?
        };
        let rank = members.place(rank);
        let rank = rank.ok_or_else(|| self.desync(format!("split `{name}` gave a group without this rank")))?;
        let gpu = self.gpu.as_ref().filter(|_| members.ranks.len() > 1).map(Gpu::of_split);
        Ok(Group { endpoint: endpoint.clone(), members: Arc::new(members), rank, gpu, heap: Arc::default() })
    }

    /// Returns the calls of this rank in all its groups, and the bytes that it sent, since the start or the last reset.
    pub fn traffic(&self) -> Traffic {
        *self.endpoint.traffic()
    }

    /// Resets the counters of [`Group::traffic`] and returns their values.
    pub fn reset_traffic(&self) -> Traffic {
        mem::take(&mut *self.endpoint.traffic())
    }

    /// Returns the last 64 calls of this rank in all its groups, oldest first, for example "17: all_gather `layers.3` of 512 bfloat16" or "3 of
    /// group `tensor`: barrier `save`".
    pub fn recent(&self) -> Vec<String> {
        self.endpoint.history.recent()
    }

    /// Waits until all ranks have called this function.
    pub fn barrier(&self, what: &str) -> Result<()> {
        self.start(Call::control(Op::Barrier, what), Vec::new()).wait().map(drop)
    }

    /// Returns the `bytes` of all ranks, in rank order. It is meant for small host data such as decisions. Lengths may differ.
    pub fn agree(&self, what: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let reply = self.start(Call::control(Op::Agree, what), bytes.to_vec()).wait()?;
        let parts = unpack(&reply).filter(|parts| parts.len() == self.size());
        parts
            .ok_or_else(|| self.desync(format!("agree `{what}` gave something else than {} byte strings", self.size())))
    }

    /// Returns this rank's result of `what` if all ranks have one. Otherwise errors on all ranks, so that no rank waits for a rank that failed.
    pub(super) fn together<T>(&self, what: &str, own: Result<T>) -> Result<T> {
        let all = self.agree(what, &[u8::from(own.is_ok())])?;
        let failed = all.iter().position(|succeeded| succeeded != &[1]);
        match (own, failed) {
            (Ok(_), Some(rank)) => Err(Error::Value(format!("{what}: rank {rank} failed; its own error says why"))),
            (own, _) => own,
        }
    }

    /// Errors on all ranks if the collectives and messages that their GPUs have started since the last comparison, in all groups, differ.
    /// `what` names the work in the error. Call it on the group of all ranks before the host waits for this work: NCCL does not compare
    /// calls, and hangs if they differ. Without GPUs this is a no-op, because every CPU call is compared.
    pub fn compare_gpu_calls(&self, what: &str) -> Result<()> {
        if self.gpu.is_none() { Ok(()) } else { self.compare_calls_so_far(what) }
    }

    pub(super) fn compare_calls_so_far(&self, what: &str) -> Result<()> {
        let mine = serde_json::to_vec(&self.endpoint.history.take_gpu_calls()).expect("calls are plain data");
        let all = self.agree(&format!("collectives of GPUs in {what}"), &mine)?;
        let read = |calls: &Vec<u8>| Some(serde_json::from_slice::<Calls>(calls).ok()?.into_iter().collect());
        let Some(all) = all.iter().map(read).collect::<Option<Vec<BTreeMap<_, _>>>>() else {
            return Err(self.desync(format!("calls of GPUs in {what} are not those of this version")));
        };
        let Some(difference) = difference(&self.members.ranks, &all) else { return Ok(()) };
        let fault = Fault::Desync(format!("in {what}, {difference}"));
        self.endpoint.link.reporter().fail(fault.clone());
        Err(fault.error(what, self.recent()))
    }

    /// Returns a handle that forwards stop requests to all ranks of the job.
    pub fn stopper(&self) -> Stopper {
        self.endpoint.stopper()
    }

    /// Starts a thread that handles faults until [`Group::finish`], or until this rank leaves its job. After a fault the thread calls `notify` with
    /// the error. If the main thread has not left the job two seconds later, because it waits for a GPU or computes for long, the thread prints the
    /// fault to standard error and ends the process with `exit_code`. Use it for ranks that are processes.
    pub fn watch(&self, exit_code: u8, notify: impl Fn(Error) + Send + 'static) -> Result<()> {
        self.endpoint.watch(exit_code, notify)
    }

    /// Waits until all ranks have called this function. Afterwards ranks may leave the job in any order, and a fault no longer ends this process.
    /// Call it on the group of all ranks, after the last call in any group.
    pub fn finish(&self) -> Result<()> {
        self.barrier("the end")?;
        self.endpoint.disarm();
        Ok(())
    }

    /// Returns a checked call on `buffer`.
    pub(super) fn call(&self, op: Op, name: &str, buffer: &Tensor) -> Result<Call> {
        let call = Call { op, name: name.into(), dtype: Some(buffer.dtype()), elements: buffer.len() };
        self.check_device(&call.title(), buffer)?;
        call.check(&self.members).map_err(Error::Value)?;
        Ok(call)
    }

    /// Returns the job's number of rank `rank` of this group. An error begins with `what`.
    pub(super) fn rank_of(&self, rank: usize, what: impl Fn() -> String) -> Result<usize> {
        let size = self.size();
        let error = || Error::Value(format!("{} rank {rank}: the group has {size} ranks", what()));
        self.members.ranks.get(rank).copied().ok_or_else(error)
    }

    pub(super) fn start(&self, call: Call, bytes: Vec<u8>) -> Started {
        let Endpoint { link, history, rank, .. } = &*self.endpoint;
        let start = |number| link.start(&self.members, number, call.clone(), bytes);
        let (numbered, reply) = history.record(&self.members, *rank, &call, start);
        self.endpoint.traffic().count(&call, self.size());
        Started { call: numbered, reply, history: history.clone() }
    }

    pub(super) fn check_device(&self, what: &str, tensor: &Tensor) -> Result<()> {
        match tensor.device() {
            Device::Cpu => Ok(()),
            _ if self.size() == 1 || self.endpoint.dry => Ok(()),
            Device::Cuda(gpu) if self.has_gpu(gpu) => match tensor.memory_kind() {
                MemoryKind::Device => Ok(()),
                MemoryKind::Host => {
                    let (expected, got) = ("device memory".into(), "host memory".into());
                    Err(Error::Placement { what: what.into(), expected, got })
                }
            },
            Device::Cuda(_) => tensor.expect_device(what, &Device::Cpu),
            Device::DryCpu(_) => Err(Error::Value(format!("{what}: a dry run has no data to send"))),
        }
    }

    fn desync(&self, message: String) -> Error {
        Error::Ranks { fault: RankFault::Desync, message, recent: self.recent() }
    }
}

/// Returns whether a tensor is on another device than the CPU.
pub(super) fn is_elsewhere(tensor: &Tensor) -> bool {
    !matches!(tensor.device(), Device::Cpu)
}

/// Describes the first channel in which the calls of its ranks differ. `all` has the calls of each of `ranks`.
fn difference(ranks: &[usize], all: &[BTreeMap<Channel, GpuCalls>]) -> Option<String> {
    let of_rank: BTreeMap<_, _> = ranks.iter().zip(all).collect();
    all.iter().flatten().find_map(|(channel, calls)| {
        let started = |rank: &usize| {
            let own = of_rank.get(rank)?.get(channel).cloned();
            Some((*rank, own.unwrap_or_else(|| GpuCalls::none(calls))))
        };
        let started: Vec<_> = calls.ranks.iter().filter_map(started).collect();
        let (first, expected) = started.first()?;
        let (other, different) = started.iter().find(|(_, other)| other != expected)?;
        let (different, expected) = (different.describe(), expected.describe());
        Some(format!("rank {other} has started {different} of its GPU, and rank {first} {expected}"))
    })
}
