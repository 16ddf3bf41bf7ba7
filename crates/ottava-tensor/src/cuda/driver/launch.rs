//! Kernel launches, and the arguments that only the driver can encode.

use super::{Context, Function, Handle, SUCCESS, Stream, api};
use crate::cuda::kernel::{DEFAULT_SHARED_BYTES, TensorMap};
use crate::error::Result;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

const FUNCTION_MAX_DYNAMIC_SHARED: i32 = 8;

/// The time at which a kernel starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Start {
    /// The kernel starts when the work that was enqueued before it has ended.
    InOrder,
    /// The kernel starts when blocks of the previous kernel leave room (CUDA C++ Programming Guide, "Programmatic Dependent Launch"). The kernel
    /// itself waits for the end of the work that was enqueued before it. It starts in order if compute waits for another stream, since only the end
    /// of a kernel can be awaited by a kernel.
    Early,
}

/// The scheduling of the blocks of a kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Scheduling {
    pub start: Start,
    /// The number of blocks of a cluster, which are neighbours along x and run at the same time. The value is 1 without clusters.
    pub cluster: u32,
}

/// The `CUlaunchConfig` of the driver.
#[repr(C)]
pub(in crate::cuda) struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: Handle,
    attributes: *const LaunchAttribute,
    attribute_count: u32,
}

/// The `CUlaunchAttribute` of the driver.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

impl LaunchAttribute {
    /// Creates the attribute `id` whose value begins with `words`.
    fn new(id: u32, words: [u32; 3]) -> LaunchAttribute {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&words);
        LaunchAttribute { id, padding: 0, value }
    }
}

/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`. Its value has three sizes.
const CLUSTER: u32 = 4;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`. Its value is a flag.
const STARTS_EARLY: u32 = 6;

impl Context {
    /// Notes that `stream` was made to wait for other work than its own.
    pub(super) fn note_wait(&self, stream: Stream) {
        if stream == Stream::Compute {
            self.compute_waits.store(true, Ordering::Relaxed);
        }
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `args` point to values of the kernel's parameter types, and the kernel accesses only the memory that they name. A kernel that starts early
    /// waits (`griddepcontrol.wait`) before it writes, and before it reads memory that earlier work writes.
    pub(in crate::cuda) unsafe fn launch(
        &self,
        function: &Function,
        how: Scheduling,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        args: &mut [*mut c_void],
    ) -> Result<()> {
        self.bind()?;
        if shared_bytes as usize > DEFAULT_SHARED_BYTES {
            // SAFETY: `function` holds its module, and the function lives as long as the module.
            let status =
                unsafe { (self.api.function_set)(function.function, FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes as i32) };
            self.check(status, &format!("{} bytes of shared memory for {}", shared_bytes, function.name))?;
        }
        self.record_launch(function.name);
        let mut attributes = Vec::with_capacity(2);
        let follows_wait = self.compute_waits.swap(false, Ordering::Relaxed);
        if how.start == Start::Early && !follows_wait {
            attributes.push(LaunchAttribute::new(STARTS_EARLY, [1, 0, 0]));
        }
        if how.cluster > 1 {
            attributes.push(LaunchAttribute::new(CLUSTER, [how.cluster, 1, 1]));
        }
        let config = LaunchConfig {
            grid,
            block: [block, 1, 1],
            shared_bytes,
            stream: self.stream(),
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as u32,
        };
        // SAFETY: the caller made this promise, and the driver copies arguments and attributes before it returns.
        match unsafe { (self.api.launch)(&config, function.function, args.as_mut_ptr(), null_mut()) } {
            SUCCESS => Ok(()),
            status => self.check(status, &format!("launch of {} on {grid:?} blocks of {block}", function.name)),
        }
    }
}

/// The `CUtensorMap` of the driver.
#[repr(C, align(64))]
struct Encoded([u64; 16]);

/// Encodes `map` as kernels read it.
pub(in crate::cuda) fn encode(map: &TensorMap) -> Result<[u64; 16]> {
    const BYTES: i32 = 0;
    const NOT_INTERLEAVED: i32 = 0;
    const SWIZZLE_128: i32 = 3;
    const PROMOTE_TO_256: i32 = 3;
    const ZEROS_BEYOND: i32 = 0;
    let (api, dims) = (api()?, map.dims());
    let mut encoded = Encoded([0; 16]);
    let sizes: Vec<u64> =
        std::iter::once(map.row_bytes).chain(dims.iter().map(|dim| dim.size)).map(|n| n as u64).collect();
    let pitches: Vec<u64> = dims.iter().map(|dim| dim.pitch as u64).collect();
    let of_box = std::iter::once(TensorMap::BOX_BYTES).chain(dims.iter().map(|dim| dim.of_box));
    let of_box: Vec<u32> = of_box.map(|n| n as u32).collect();
    let steps = vec![1u32; sizes.len()];
    // SAFETY: there are as many sizes of the tensor, sizes of a box and steps as dimensions, and a distance for each but the first. The driver writes 128
    // bytes, aligned to 64.
    let status = unsafe {
        (api.encode_tiled)(
            encoded.0.as_mut_ptr().cast(),
            BYTES,
            sizes.len() as u32,
            map.address,
            sizes.as_ptr(),
            pitches.as_ptr(),
            of_box.as_ptr(),
            steps.as_ptr(),
            NOT_INTERLEAVED,
            SWIZZLE_128,
            PROMOTE_TO_256,
            ZEROS_BEYOND,
        )
    };
    api.check(status, &format!("cuTensorMapEncodeTiled of {map:?}")).map(|()| encoded.0)
}
