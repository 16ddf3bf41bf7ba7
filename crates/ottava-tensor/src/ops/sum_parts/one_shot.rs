//! One-shot sums: each rank writes its part to memory of the other ranks, and adds the parts of all ranks in their order.

use super::expect_addend;
use crate::ops::declaration::kernels;
use crate::ops::launch;
use crate::{DType, Device, Error, Result, Tensor};

kernels! {
    static SOURCE = { file: "one_shot", constants: [THREADS, EACH, BLOCKS], variants: launch::STORAGE };
    kernel sum_in_one_shot(
        y: *mut X, x: *const X, addend: *const X, calls: *mut u64, inboxes: *const u64, rank: i32, ranks: i32, n: u64
    );
}

/// The threads of a block.
const THREADS: usize = 512;

/// The most lines of each eight threads in a call.
const EACH: usize = 4;

/// The most blocks. They run at once, so that a block that waits for lines of another rank does not keep other blocks from sending theirs.
const BLOCKS: usize = 128;

/// The bytes of a line: its values, and the number of its call.
const LINE_BYTES: usize = 128;

/// The bytes of the values of a line.
const VALUE_BYTES: usize = 120;

/// The lines that a block processes at once.
const STEP: usize = THREADS / 8;

/// The most bytes of a part of two ranks, and of more ranks. Each rank sends its part to each other rank, so more than two ranks send fewer bytes if they
/// add slices.
const MOST_BYTES: [usize; 2] = [64 << 20, 2 << 20];

/// The memory in which the ranks of a group write parts of sums for each other.
pub(crate) struct Inboxes {
    rank: usize,
    /// The address in this process of each rank's inbox, I64 `[ranks]`.
    addresses: Tensor,
    /// The number of the last call of each block, I64 `[BLOCKS]`.
    calls: Tensor,
}

impl Inboxes {
    /// Returns the bytes of a rank's inbox in a group of `ranks` ranks. The lines of two consecutive calls are kept: a rank that waits for the lines of a
    /// call may already receive lines of the next call.
    pub(crate) fn bytes(ranks: usize) -> usize {
        2 * ranks * BLOCKS * STEP * EACH * LINE_BYTES
    }

    /// Creates the inboxes of a group. `addresses` are those of zeros of [`Inboxes::bytes`] on each rank, which all ranks can write until the process
    /// ends.
    pub(crate) fn new(device: &Device, rank: usize, addresses: &[u64]) -> Result<Inboxes> {
        let addresses: Vec<_> = addresses.iter().map(|&address| address as i64).collect();
        let addresses = Tensor::from_slice(device, &[addresses.len()], &addresses)?;
        Ok(Inboxes { rank, addresses, calls: Tensor::zeros(device, &[BLOCKS], DType::I64)? })
    }

    /// Returns whether the part of one of `ranks` ranks has a size and a type that a one-shot sum supports.
    pub(crate) fn fits(part: &Tensor, ranks: usize) -> bool {
        let most = MOST_BYTES[usize::from(ranks > 2)];
        launch::storage(part.dtype()).is_ok() && (1..=most).contains(&part.bytes())
    }
}

/// Computes `y = addend + Σ x` over the ranks of the inboxes, as [`sum_parts`](super::sum_parts) does. All ranks make the same calls in the same order.
/// `x` must [fit](Inboxes::fits). Tensors may have any shapes.
pub(crate) fn sum_in_one_shot(
    inboxes: &mut Inboxes,
    x: &Tensor,
    addend: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    expect_addend(addend, x)?;
    y.expect("sum_in_one_shot: y", x.shape())?;
    y.expect_dtype("sum_in_one_shot: y", &[x.dtype()])?;
    let Device::Cuda(gpu) = x.device() else {
        return Err(Error::Value("sum_in_one_shot: only GPUs have inboxes".into()));
    };
    let Inboxes { rank, addresses, calls } = inboxes;
    let blocks = x.bytes().div_ceil(VALUE_BYTES).div_ceil(STEP).min(BLOCKS);
    let entry = kernel::sum_in_one_shot(y, x, addend, calls, &*addresses, *rank, addresses.len(), x.len());
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `x`, `addend` and `y` have equally many elements, and the lines of a call fit into the inboxes, which live until the process ends. Before it
    // waits, the kernel reads only the addresses, which never change.
    unsafe { gpu.launch_early(&kernel, [blocks as u32, 1, 1], THREADS as u32, 0) }
}
