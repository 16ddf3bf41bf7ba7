//! Access of GPUs to each other's memory, memory that processes share, and words in this memory for which streams wait.

use super::{Context, Stream, api};
use crate::error::Result;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
/// `CU_STREAM_WAIT_VALUE_EQ`.
const WAIT_EQUAL: u32 = 1;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`: earlier writes of the stream become visible first.
const WRITE_DEFAULT: u32 = 0;

/// The way in which one GPU reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerLink {
    /// Direct access with atomic operations. NVLink has them, and PCIe lacks them.
    NvLink,
    /// Direct access through PCIe.
    Pcie,
    /// Access through the memory of the host.
    None,
}

/// Returns how GPU `from` reaches the memory of GPU `to`. The numbers are indices among the GPUs that the driver shows.
pub(in crate::cuda) fn peer_link(from: usize, to: usize) -> Result<PeerLink> {
    // The values are `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED` and `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
    const ACCESS: i32 = 2;
    const ATOMICS: i32 = 3;
    let api = api()?;
    let device = |ordinal: usize| {
        let mut device = 0;
        // SAFETY: the driver writes one int.
        api.check(unsafe { (api.device_get)(&mut device, ordinal as i32) }, "cuDeviceGet").map(|()| device)
    };
    let (from, to) = (device(from)?, device(to)?);
    let has = |attribute| {
        let mut value = 0;
        // SAFETY: the driver writes one int.
        let status = unsafe { (api.peer_attribute)(&mut value, attribute, from, to) };
        api.check(status, "cuDeviceGetP2PAttribute").map(|()| value != 0)
    };
    Ok(match (has(ACCESS)?, has(ATOMICS)?) {
        (true, true) => PeerLink::NvLink,
        (true, false) => PeerLink::Pcie,
        (false, _) => PeerLink::None,
    })
}

/// Returns the index of the GPU with this UUID among the GPUs that the driver shows.
pub(in crate::cuda) fn ordinal_of(uuid: &[u8]) -> Result<Option<usize>> {
    let api = api()?;
    for ordinal in 0..super::device_count()? {
        let (mut device, mut found) = (0, [0; 16]);
        // SAFETY: the driver writes one int.
        api.check(unsafe { (api.device_get)(&mut device, ordinal as i32) }, "cuDeviceGet")?;
        // SAFETY: the driver writes 16 bytes.
        api.check(unsafe { (api.device_uuid)(&mut found, device) }, "cuDeviceGetUuid")?;
        if found == uuid {
            return Ok(Some(ordinal));
        }
    }
    Ok(None)
}

/// `CUipcMemHandle`: a handle with which other processes of the machine open an allocation of the driver.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) struct IpcHandle([u8; 64]);

/// Device memory that other processes of the machine can open. It is described by an allocation of the driver and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Exported {
    /// The handle of the allocation.
    pub(in crate::cuda) handle: IpcHandle,
    /// The offset in bytes from the start of the allocation.
    pub(in crate::cuda) offset: u64,
}

impl Exported {
    /// The number of bytes that [`Exported::to_bytes`] returns.
    pub(in crate::cuda) const BYTES: usize = 72;

    pub(in crate::cuda) fn to_bytes(self) -> [u8; Exported::BYTES] {
        let mut bytes = [0; Exported::BYTES];
        bytes[..64].copy_from_slice(&self.handle.0);
        bytes[64..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// Reads the bytes of [`Exported::to_bytes`]. Returns `None` if they have another length.
    pub(in crate::cuda) fn from_bytes(bytes: &[u8]) -> Option<Exported> {
        let (handle, offset) = bytes.split_first_chunk::<64>()?;
        Some(Exported { handle: IpcHandle(*handle), offset: u64::from_le_bytes(offset.try_into().ok()?) })
    }
}

impl Context {
    /// Lets other processes open the memory at `pointer`. The memory must be part of an allocation of [`Context::allocate`].
    pub(in crate::cuda) fn export(&self, pointer: u64) -> Result<Exported> {
        self.bind()?;
        let (mut base, mut bytes, mut handle) = (0, 0, IpcHandle([0; 64]));
        // SAFETY: the driver writes an address and a size.
        let status = unsafe { (self.api.allocation_of)(&mut base, &mut bytes, pointer) };
        self.check(status, "cuMemGetAddressRange")?;
        // SAFETY: the driver writes 64 bytes.
        self.check(unsafe { (self.api.ipc_export)(&mut handle, base) }, "cuIpcGetMemHandle")?;
        Ok(Exported { handle, offset: pointer - base })
    }

    /// Opens an allocation of another process. Returns its address in this process.
    pub(in crate::cuda) fn open_exported(&self, handle: IpcHandle) -> Result<u64> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: the driver writes one address.
        let status = unsafe { (self.api.ipc_open)(&mut pointer, handle, LAZY_ENABLE_PEER_ACCESS) };
        self.check(status, "cuIpcOpenMemHandle")?;
        Ok(pointer)
    }

    /// Closes an allocation of another process.
    ///
    /// # Safety
    /// `base` came from [`Context::open_exported`], and no enqueued work uses the memory.
    pub(in crate::cuda) unsafe fn close_exported(&self, base: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.ipc_close)(base) }, "cuIpcCloseMemHandle")
    }

    /// Enqueues a write of one word. Earlier writes of the stream are visible before this write.
    ///
    /// # Safety
    /// `word` is the address of four bytes of device memory or of memory that this process has opened. Only streams read and write this word.
    pub(in crate::cuda) unsafe fn write_word(&self, stream: Stream, word: u64, value: u32) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        let status = unsafe { (self.api.write_value)(self.handle(stream), word, value, WRITE_DEFAULT) };
        self.check(status, "cuStreamWriteValue32")
    }

    /// Makes the stream wait until a word equals `value`.
    ///
    /// # Safety
    /// The conditions of [`Context::write_word`] must hold.
    pub(in crate::cuda) unsafe fn wait_for_word(&self, stream: Stream, word: u64, value: u32) -> Result<()> {
        self.bind()?;
        self.note_wait(stream);
        // SAFETY: the caller's promise.
        let status = unsafe { (self.api.wait_value)(self.handle(stream), word, value, WAIT_EQUAL) };
        self.check(status, "cuStreamWaitValue32")
    }
}
