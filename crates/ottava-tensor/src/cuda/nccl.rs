//! NCCL: collectives and messages between GPUs. Each process has one GPU.
//!
//! A call is enqueued in the communication stream after the earlier work of compute, and compute waits for the call when its [`Transfer`] ends.
//! NCCL compares nothing between ranks: the caller promises equal types, sizes and order. Communicators are not destroyed, because
//! `ncclCommDestroy` waits until no graph refers to them and each rank of the machine calls it. The end of the process frees them.
//!
//! While a rank is missing, kernels of the other ranks spin, and synchronising never returns.

use super::beside::Beside;
use super::device::CudaDevice;
use super::driver::{CHANNELS, Context, Handle, Stream};
use super::dry;
use super::load::{LibraryReport, NCCL, Problem, SearchPath, SharedLibrary, dotted, functions};
use super::lock::lock;
use super::transfer::Transfer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, OnceLock};

functions! {
    struct Api {
        version = ncclGetVersion(*mut i32) -> i32;
        unique_id = ncclGetUniqueId(*mut NcclId) -> i32;
        init = ncclCommInitRankConfig(*mut Handle, i32, NcclId, i32, *mut Config) -> i32;
        error_string = ncclGetErrorString(i32) -> *const c_char;
        last_error = ncclGetLastError(Handle) -> *const c_char;
        all_gather = ncclAllGather(*const c_void, *mut c_void, usize, i32, Handle, Handle) -> i32;
        reduce_scatter = ncclReduceScatter(*const c_void, *mut c_void, usize, i32, i32, Handle, Handle) -> i32;
        all_reduce = ncclAllReduce(*const c_void, *mut c_void, usize, i32, i32, Handle, Handle) -> i32;
        broadcast = ncclBroadcast(*const c_void, *mut c_void, usize, i32, i32, Handle, Handle) -> i32;
        send = ncclSend(*const c_void, usize, i32, i32, Handle, Handle) -> i32;
        receive = ncclRecv(*mut c_void, usize, i32, i32, Handle, Handle) -> i32;
        group_start = ncclGroupStart() -> i32;
        group_end = ncclGroupEnd() -> i32;
    }
}

/// The id with which the ranks of a communicator find each other (`ncclUniqueId`). A process that knows the id can join.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NcclId(pub(crate) [u8; 128]);

/// The `ncclConfig_t` of version 2.28, which later versions accept.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const c_char,
    split_share: i32,
    traffic_class: i32,
    comm_name: *const c_char,
    collnet_enable: i32,
    cta_policy: i32,
    shrink_share: i32,
    nvls_ctas: i32,
    channels_per_net_peer: i32,
    nvlink_centric_sched: i32,
}

/// `NCCL_CONFIG_UNDEF_INT`, which selects the library's default.
const UNDEFINED: i32 = i32::MIN;

impl Config {
    const OURS: Config = Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 22_803,
        blocking: 1,
        cga_cluster_size: UNDEFINED,
        min_ctas: UNDEFINED,
        max_ctas: UNDEFINED,
        net_name: null(),
        split_share: UNDEFINED,
        traffic_class: UNDEFINED,
        comm_name: null(),
        collnet_enable: UNDEFINED,
        cta_policy: UNDEFINED,
        shrink_share: UNDEFINED,
        nvls_ctas: UNDEFINED,
        channels_per_net_peer: UNDEFINED,
        nvlink_centric_sched: UNDEFINED,
    };
}

const SUCCESS: i32 = 0;
/// `ncclUint8`. Data that is only moved is moved as bytes.
const BYTES: i32 = 1;

/// The operation with which NCCL combines elements (`ncclRedOp_t`).
#[derive(Clone, Copy, Debug)]
pub(crate) enum NcclOp {
    Sum = 0,
    Max = 2,
}

/// One side of a message: `bytes` bytes of device memory, sent to or received from the rank `peer` of the communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    pub(crate) peer: usize,
}

/// A collective on device memory, or messages. Addresses are the addresses of whole buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Collective {
    /// Gathers slices of `slice` bytes in place.
    AllGather { buffer: u64, slice: usize },
    /// Sums slices of `slice` elements.
    ReduceScatter { input: u64, output: u64, slice: usize, dtype: DType },
    /// Combines `elements` elements in place.
    AllReduce { buffer: u64, elements: usize, dtype: DType, op: NcclOp },
    /// Exchanges slices of `slice` bytes.
    AllToAll { input: u64, output: u64, slice: usize },
    /// Sends `bytes` bytes of the rank `root` to each rank, in place.
    Broadcast { buffer: u64, bytes: usize, root: usize },
    /// Sends and receives at the same time, so that neither message waits for the other.
    Messages { send: Option<Message>, receive: Option<Message> },
}

fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| SharedLibrary::open(&NCCL, SearchPath::of_process()).and_then(Api::load))
}

fn api() -> Result<&'static Api> {
    opened().as_ref().map_err(|problem| problem.clone().into())
}

pub(super) fn report() -> LibraryReport {
    LibraryReport::new(
        &NCCL,
        opened(),
        |api| &api.library,
        |api| {
            let mut version = 0;
            // SAFETY: NCCL writes one int.
            let status = unsafe { (api.version)(&mut version) };
            (status == SUCCESS).then(|| dotted(version as usize))
        },
    )
}

/// Returns NCCL's number of a type that it reduces.
fn nccl_type(dtype: DType) -> Result<i32> {
    match dtype {
        DType::I32 => Ok(2),
        DType::I64 => Ok(4),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::F64 => Ok(8),
        DType::BF16 => Ok(9),
        DType::E4M3 | DType::E5M2 | DType::E8M0 | DType::U8 | DType::I16 => {
            Err(Error::Value(format!("NCCL does not reduce {dtype}")))
        }
    }
}

impl Api {
    /// Returns NCCL's message as an error if `status` is not success. `comm` may be null.
    fn check(&self, status: i32, call: &str, comm: Handle) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: NCCL returns constant strings, or null.
        let [words, last] = unsafe { [(self.error_string)(status), (self.last_error)(comm)] }.map(|text| {
            // SAFETY: the pointer is not null, and the string ends with a zero.
            if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() }
        });
        let last = if last.trim().is_empty() { last } else { format!(": {}", last.trim()) };
        let message = format!("{words}{last}; NCCL_DEBUG=INFO prints its log");
        Err(Error::Cuda { library: NCCL.name, call: call.to_string(), message })
    }
}

/// Opens the library. If it is missing, the error names it and its remedy.
pub(crate) fn require_nccl() -> Result<()> {
    api().map(drop)
}

impl NcclId {
    /// Creates a new id.
    pub(crate) fn new() -> Result<NcclId> {
        let (api, mut id) = (api()?, NcclId([0; 128]));
        // SAFETY: NCCL writes 128 bytes.
        api.check(unsafe { (api.unique_id)(&mut id) }, "ncclGetUniqueId", null_mut())?;
        Ok(id)
    }
}

/// The communicator of one GPU in a group.
pub(crate) struct NcclComm {
    api: &'static Api,
    device: Arc<CudaDevice>,
    /// The communicator. It is locked while a call is enqueued, so that events and calls of two threads do not mix.
    comm: Mutex<CommHandle>,
    rank: usize,
    size: usize,
    stream: Stream,
}

struct CommHandle(Handle);

// SAFETY: NCCL accepts calls from any thread, one at a time. The mutex that contains the handle ensures this.
unsafe impl Send for CommHandle {}

impl NcclComm {
    /// Joins the communicator of `id` as rank `rank` of `size` ranks, with `device`. Returns when each rank has joined.
    ///
    /// A channel that does not exist is [`Error::Value`].
    pub(crate) fn join(
        device: &Arc<CudaDevice>,
        id: NcclId,
        rank: usize,
        size: usize,
        beside: Beside,
    ) -> Result<NcclComm> {
        let stream = match beside {
            Beside::Channel(channel) if channel >= CHANNELS => {
                return Err(Error::Value(format!("messages have {CHANNELS} channels, and this is channel {channel}")));
            }
            Beside::Channel(channel) => Stream::Channel(channel),
            Beside::Kernels | Beside::Product | Beside::Nothing => Stream::Communication,
        };
        let (api, mut comm) = (api()?, null_mut());
        let mut config = Config {
            max_ctas: beside.most_ctas(),
            cga_cluster_size: beside.cluster().unwrap_or(UNDEFINED),
            ..Config::OURS
        };
        // NCCL uses the current context.
        device.context().ok_or_else(|| dry::unsupported("collectives of several ranks"))?.bind()?;
        // SAFETY: NCCL writes one handle, and reads `config` during the call. The context is current.
        let status = unsafe { (api.init)(&mut comm, size as i32, id, rank as i32, &mut config) };
        api.check(status, "ncclCommInitRankConfig", null_mut())?;
        Ok(NcclComm { api, device: device.clone(), comm: Mutex::new(CommHandle(comm)), rank, size, stream })
    }

    /// Enqueues a collective. Each rank must make its calls in the same order.
    ///
    /// # Safety
    /// The buffers are live device memory of this device until the transfer ends, and no other work of a side stream uses them.
    pub(crate) unsafe fn enqueue(&self, name: &'static str, collective: Collective) -> Result<Transfer> {
        let comm = lock(&self.comm);
        Transfer::by_kernels(&self.device, self.stream, name, |context| {
            context.record_launch(name);
            // SAFETY: the caller's promise.
            let status = unsafe { self.call(context, comm.0, collective)? };
            self.api.check(status, name, comm.0)
        })
    }

    /// Calls the function of `collective`, and returns its status.
    ///
    /// # Safety
    /// The conditions of [`NcclComm::enqueue`] must hold.
    unsafe fn call(&self, context: &Context, comm: Handle, collective: Collective) -> Result<i32> {
        let (api, stream) = (self.api, context.handle(self.stream));
        let at = |address: u64, slice: usize, index: usize| (address + (slice * index) as u64) as *mut c_void;
        // SAFETY: the caller made this promise, and the slices are parts of the buffers.
        Ok(unsafe {
            match collective {
                Collective::AllGather { buffer, slice } => {
                    (api.all_gather)(at(buffer, slice, self.rank), at(buffer, 0, 0), slice, BYTES, comm, stream)
                }
                Collective::ReduceScatter { input, output, slice, dtype } => {
                    let (dtype, sum) = (nccl_type(dtype)?, NcclOp::Sum as i32);
                    (api.reduce_scatter)(at(input, 0, 0), at(output, 0, 0), slice, dtype, sum, comm, stream)
                }
                Collective::AllReduce { buffer, elements, dtype, op } => {
                    let buffer = at(buffer, 0, 0);
                    (api.all_reduce)(buffer, buffer, elements, nccl_type(dtype)?, op as i32, comm, stream)
                }
                Collective::AllToAll { input, output, slice } => {
                    let of = |buffer, peer| Message { address: at(buffer, slice, peer) as u64, bytes: slice, peer };
                    let (sent, received) = (|peer| of(input, peer), |peer| of(output, peer));
                    self.messages((0..self.size).map(sent), (0..self.size).map(received), comm, stream)
                }
                Collective::Broadcast { buffer, bytes, root } => {
                    let buffer = at(buffer, 0, 0);
                    (api.broadcast)(buffer, buffer, bytes, BYTES, root as i32, comm, stream)
                }
                Collective::Messages { send, receive } => self.messages(send, receive, comm, stream),
            }
        })
    }

    /// Enqueues messages as one group, because a send waits for its receive. Returns the first status that is not success.
    ///
    /// # Safety
    /// The conditions of [`NcclComm::enqueue`] must hold.
    unsafe fn messages(
        &self,
        sent: impl IntoIterator<Item = Message>,
        received: impl IntoIterator<Item = Message>,
        comm: Handle,
        stream: Handle,
    ) -> i32 {
        // SAFETY: the caller's promise.
        unsafe {
            let mut statuses = vec![(self.api.group_start)()];
            for Message { address, bytes, peer } in sent {
                statuses.push((self.api.send)(address as *const c_void, bytes, BYTES, peer as i32, comm, stream));
            }
            for Message { address, bytes, peer } in received {
                statuses.push((self.api.receive)(address as *mut c_void, bytes, BYTES, peer as i32, comm, stream));
            }
            statuses.push((self.api.group_end)());
            statuses.into_iter().find(|&status| status != SUCCESS).unwrap_or(SUCCESS)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// The expected layout is the layout of `nccl.h` 2.28.
    #[test]
    fn the_configuration_has_the_layout_of_the_header() {
        assert_eq!((size_of::<Config>(), size_of::<NcclId>()), (80, 128));
        let offsets = [
            (offset_of!(Config, magic), 8),
            (offset_of!(Config, blocking), 16),
            (offset_of!(Config, max_ctas), 28),
            (offset_of!(Config, net_name), 32),
            (offset_of!(Config, comm_name), 48),
            (offset_of!(Config, nvlink_centric_sched), 76),
        ];
        assert!(offsets.iter().all(|(ours, header)| ours == header), "{offsets:?}");
    }

    #[test]
    fn the_library_has_every_function_and_makes_ids() {
        let Ok(api) = opened() else {
            eprintln!("skipped: no NCCL: {:?}", report().problem);
            return;
        };
        assert!(report().version.is_some_and(|version| version.starts_with("2.")), "{:?}", report());
        let message = api.check(5, "ncclAllGather", null_mut()).unwrap_err().to_string();
        assert!(message.starts_with("NCCL: ncclAllGather failed: invalid usage"), "{message}");
        // An id names a network interface of this machine. A sandbox may have no interface.
        match [NcclId::new(), NcclId::new()] {
            [Ok(a), Ok(b)] => assert_ne!(a.0, b.0),
            [a, b] => eprintln!("no id: {:?}", a.and(b).err()),
        }
    }
}
