//! Groups of ranks and their collectives.
//!
//! A [`Group`] is one rank's membership in a group: [`Group::solo`] is a group of one, in [`threads::group`] ranks are threads, in
//! [`process::join`] they are processes connected by TCP, and [`Group::dry`] counts for a plan. All ranks of a group call the same
//! collectives in the same order. Each call carries its number, kind, name, type and size; if those differ between ranks, all get an error
//! that names both sides. If a rank ends, open and later collectives of the others end with an error that names it.
//!
//! Sums are added in rank order in F32 (F64 for F64) and rounded once, so that a result depends neither on timing nor on the backend.
//!
//! [`Group::with_gpu`] adds collectives of GPU tensors by NCCL. They overlap with the compute stream, can be captured in a
//! [`Graph`](crate::cuda::Graph), and are not compared between ranks: that would cost more than the collective. Their sums are NCCL's.

mod call;
mod combine;
mod dry;
mod fault;
mod history;
mod hub;
mod limits;
mod link;
mod nccl;
mod pending;
pub mod process;
mod progress;
mod solo;
#[cfg(test)]
mod tests;
pub mod threads;
mod traffic;
mod watch;

pub use call::Reduce;
pub use limits::Limits;
pub use pending::Pending;
pub use progress::report_progress;
pub use traffic::{Sent, Traffic};

use crate::cuda::NcclComm;
use crate::device::{Device, MemoryKind};
use crate::error::{Error, RankFault, Result};
use crate::tensor::Tensor;
use call::{Call, Op};
use combine::unpack;
use fault::Fault;
use history::History;
use link::{Link, Reporter};
use pending::{Progress, Started};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use watch::{GRACE, Orders, Watch};

/// One rank's membership in a group. Dropping it leaves the group, which ends the collectives of the other ranks with an error.
///
/// Tensors are on the CPU, or on the GPU of [`Group::with_gpu`]; in a group of one on any device. `name` is the tensor or unit that a
/// collective serves, the same on all ranks, for messages. A collective starts when it is called and ends in [`Pending::wait`], which
/// returns the tensor that it writes; several may be in progress. Tensors that are written must have no other views.
///
/// Collectives error with [`Error::Placement`] for tensors elsewhere and with [`Error::Value`] for types and sizes that do not
/// fit; those are found before anything is sent. They and their `wait` error with [`Error::Ranks`] when the group has failed.
pub struct Group {
    rank: usize,
    size: usize,
    link: Box<dyn Link>,
    history: Arc<History>,
    traffic: Mutex<Traffic>,
    /// Collectives of GPU tensors.
    nccl: Option<NcclComm>,
    /// Whether the other ranks do not exist.
    dry: bool,
    /// Ends the process when the group fails. Disarmed before `link` leaves the group.
    watch: Option<Watch>,
    limits: Limits,
}

/// Passes a request to stop on to all ranks of a group, from any thread, also when this rank has left it.
#[derive(Clone)]
pub struct Stopper(Arc<dyn Reporter>);

impl Stopper {
    /// Requests all ranks to stop: each is told by [`process::Supervisor::request_stop`].
    pub fn request(&self) {
        self.0.stop();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.watch = None;
    }
}

impl Group {
    fn new(rank: usize, size: usize, link: Box<dyn Link>, limits: Limits) -> Group {
        Group {
            rank,
            size,
            link,
            history: Arc::default(),
            traffic: Mutex::default(),
            nccl: None,
            dry: false,
            watch: None,
            limits,
        }
    }

    /// This rank, from 0 to `size - 1`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Calls and bytes sent by this rank since the start or the last reset.
    pub fn traffic(&self) -> Traffic {
        *self.counters()
    }

    /// Sets the counters of [`Group::traffic`] to zero and returns what they were.
    pub fn reset_traffic(&self) -> Traffic {
        std::mem::take(&mut *self.counters())
    }

    /// The last 64 collectives of this rank, oldest first, as "17: all_gather `layers.3` of 512 bfloat16".
    pub fn recent(&self) -> Vec<String> {
        self.history.recent()
    }

    /// Collects the slices of all ranks, in place: of `size · n` elements of any type, rank `r` has `r·n..(r+1)·n` before, and
    /// all have all of them after.
    pub fn all_gather(&self, name: &str, buffer: Tensor) -> Result<Pending> {
        let call = self.call(Op::AllGather, name, &buffer)?;
        if is_elsewhere(&buffer) {
            return self.start_on_gpu(&call, None, buffer);
        }
        let own = buffer.reshape(&[self.size, buffer.len() / self.size])?.rows(self.rank, self.rank + 1)?;
        let bytes = own.read_bytes()?;
        drop(own);
        Ok(self.pending(call, bytes, None, buffer))
    }

    /// Sums `input` over all ranks in rank order and writes slice `r` of the sum to the `output` of rank `r`.
    ///
    /// `input` has `size · n` elements in F64, F32, F16 or BF16; `output` has `n` in the same type or in F32. Sums are in F32 (F64
    /// for F64), rounded once. On GPUs the output has the type of the input.
    pub fn reduce_scatter(&self, name: &str, input: &Tensor, output: Tensor) -> Result<Pending> {
        let call = self.call(Op::ReduceScatter { output: output.dtype() }, name, input)?;
        self.check_output(&call, &output, input.len() / self.size)?;
        if is_elsewhere(input) {
            return self.start_on_gpu(&call, Some(input), output);
        }
        Ok(self.pending(call, input.read_bytes()?, Some(input.clone()), output))
    }

    /// Reduces `buffer` element by element over all ranks, in place. A sum has the bits of [`Group::reduce_scatter`] to the same
    /// type followed by [`Group::all_gather`].
    pub fn all_reduce(&self, name: &str, reduce: Reduce, buffer: Tensor) -> Result<Pending> {
        let call = self.call(Op::AllReduce(reduce), name, &buffer)?;
        if is_elsewhere(&buffer) {
            return self.start_on_gpu(&call, None, buffer);
        }
        let bytes = buffer.read_bytes()?;
        Ok(self.pending(call, bytes, None, buffer))
    }

    /// Sends slice `r` of `input` to rank `r`: slice `s` of `output` becomes slice `r` of the `input` of rank `s`. Both have
    /// `size · n` elements of the same type, which may be any.
    pub fn all_to_all(&self, name: &str, input: &Tensor, output: Tensor) -> Result<Pending> {
        let call = self.call(Op::AllToAll, name, input)?;
        self.check_output(&call, &output, input.len())?;
        if output.dtype() != input.dtype() {
            return Err(Error::Value(format!("{call}: the output is {}", output.dtype())));
        }
        if is_elsewhere(input) {
            return self.start_on_gpu(&call, Some(input), output);
        }
        Ok(self.pending(call, input.read_bytes()?, Some(input.clone()), output))
    }

    /// Copies `buffer` of rank `root` to all ranks, in place; any type.
    pub fn broadcast(&self, name: &str, root: usize, buffer: Tensor) -> Result<Pending> {
        let call = self.call(Op::Broadcast { root }, name, &buffer)?;
        if is_elsewhere(&buffer) {
            return self.start_on_gpu(&call, None, buffer);
        }
        let bytes = if root == self.rank { buffer.read_bytes()? } else { Vec::new() };
        Ok(self.pending(call, bytes, None, buffer))
    }

    /// Waits until all ranks have called it.
    pub fn barrier(&self, what: &str) -> Result<()> {
        self.start(Call::control(Op::Barrier, what), Vec::new()).wait().map(drop)
    }

    /// The `bytes` of all ranks, in rank order; for small data of the host, such as decisions. Lengths may differ.
    pub fn agree(&self, what: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let reply = self.start(Call::control(Op::Agree, what), bytes.to_vec()).wait()?;
        unpack(&reply).filter(|parts| parts.len() == self.size).ok_or_else(|| {
            let message = format!("agree `{what}` gave something else than {} byte strings", self.size);
            Error::Ranks { fault: RankFault::Desync, message, recent: self.recent() }
        })
    }

    /// Errors on all ranks unless all have started the same collectives of their GPUs since the last call; `what` is the work that they belong
    /// to. To be called before the host waits for that work: NCCL does not compare collectives, and waits for ever where they differ.
    /// Without GPUs nothing is compared, since all collectives are.
    pub fn compare_gpu_calls(&self, what: &str) -> Result<()> {
        if self.nccl.is_none() { Ok(()) } else { self.compare_calls_so_far(what) }
    }

    fn compare_calls_so_far(&self, what: &str) -> Result<()> {
        let mine = self.history.take_gpu_calls();
        let all = self.agree(&format!("collectives of GPUs in {what}"), mine.as_bytes())?;
        let Some(other) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let started = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        let fault = Fault::Desync(format!(
            "in {what}, rank {other} has started {} of its GPU, and rank 0 {}",
            started(other),
            started(0)
        ));
        self.link.reporter().fail(fault.clone());
        Err(fault.error(what, self.recent()))
    }

    /// Passes requests to stop on to all ranks.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.link.reporter())
    }

    /// From here on until [`Group::finish`] or the drop, a fault of the group calls `notify` and, if the main thread has not left the group
    /// two seconds later, ends this process with `exit_code`, its sentence on standard error: the main thread may wait for a GPU for
    /// ever, or compute for long. For ranks that are processes.
    pub fn watch(&mut self, exit_code: u8, notify: impl Fn() + Send + 'static) -> Result<()> {
        let orders = Orders {
            rank: self.rank,
            limit: self.limits.collective,
            grace: GRACE,
            notify: Box::new(notify),
            end: Box::new(move |error| watch::end_process(&error, exit_code)),
        };
        let watch = Watch::start(&*self.link, self.history.clone(), orders);
        self.watch = Some(watch.map_err(|source| Error::Io { path: "a thread for faults of ranks".into(), source })?);
        Ok(())
    }

    /// Waits until all ranks have called it, after their last collective: they may leave then in any order. A later fault of the group no
    /// longer ends this process.
    pub fn finish(&self) -> Result<()> {
        self.barrier("the end")?;
        self.watch.iter().for_each(Watch::disarm);
        Ok(())
    }

    fn counters(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call over `buffer`, checked.
    fn call(&self, op: Op, name: &str, buffer: &Tensor) -> Result<Call> {
        let call = Call { op, name: name.into(), dtype: Some(buffer.dtype()), elements: buffer.len() };
        self.check_device(&call.title(), buffer)?;
        call.check(self.size).map_err(Error::Value)?;
        Ok(call)
    }

    fn check_output(&self, call: &Call, output: &Tensor, elements: usize) -> Result<()> {
        self.check_device(&format!("{}: output", call.title()), output)?;
        if output.len() == elements {
            return Ok(());
        }
        Err(Error::Value(format!("{call}: the output has {} elements, expected {elements}", output.len())))
    }

    fn start(&self, call: Call, bytes: Vec<u8>) -> Started {
        let (number, reply) = self.history.record(&call, |number| self.link.start(number, call.clone(), bytes));
        self.counters().count(&call, self.size);
        Started { call, number, reply, history: self.history.clone() }
    }

    fn pending(&self, call: Call, bytes: Vec<u8>, input: Option<Tensor>, output: Tensor) -> Pending {
        Pending { progress: Progress::Sent(self.start(call, bytes)), output, _input: input }
    }

    fn check_device(&self, what: &str, tensor: &Tensor) -> Result<()> {
        match tensor.device() {
            Device::Cpu => Ok(()),
            _ if self.size == 1 || self.dry => Ok(()),
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
}

/// Whether a tensor is not on the CPU.
fn is_elsewhere(tensor: &Tensor) -> bool {
    !matches!(tensor.device(), Device::Cpu)
}
