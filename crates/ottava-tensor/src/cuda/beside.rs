//! How communication and compute share the multiprocessors of a GPU.

/// What compute does while the calls of a communicator run. They go through a stream of their own only in a channel; on how many
/// multiprocessors they run decides how fast they are, and how much they slow kernels beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// It runs many kernels, and none of these waits for them soon.
    Kernels,
    /// It runs one product, which leaves them their multiprocessors ([`CudaDevice::beside_collectives`](super::CudaDevice::beside_collectives)).
    Product,
    /// It waits.
    Nothing,
    /// It runs kernels while messages of this channel wait for their other side.
    Channel(usize),
}

impl Beside {
    /// Multiprocessors that a product beside messages leaves to them: most CTAs of [`Beside::Product`].
    pub(super) const SPARED: usize = 24;

    /// Most CTAs of a call, by measurements on two H200 (docs/parallelism.md). The CTAs of [`Beside::Channel`] are not measured.
    pub(super) fn most_ctas(self) -> i32 {
        match self {
            // A reduce-scatter beside the products of a block leaves 207 µs that they do not hide with 16, and 270 µs with the library's choice.
            Beside::Kernels => 16,
            Beside::Product => Beside::SPARED as i32,
            Beside::Nothing => 32,
            Beside::Channel(_) => 2,
        }
    }

    /// CTAs of a cluster, 0 for none; `None` for the library's choice. A cluster needs free multiprocessors that are
    /// neighbours, and the multiprocessors that a product leaves may not be neighbours: with the library's clusters of
    /// four, messages started when the product beside them had ended.
    pub(super) fn cluster(self) -> Option<i32> {
        (self == Beside::Product).then_some(0)
    }
}
